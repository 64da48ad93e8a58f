"""Conservative Q-learning (Kumar et al., 2020, arXiv 2006.04779), based on double DQN or, for continuous actions, SAC.

A penalty pushes down a soft maximum over the values of all actions, and pushes up the values of the actions in the data. In the
shape descriptions, `B` is `batch_size`, `C` denotes the two critics, `D` is the length of a continuous action and `S` is
`num_samples`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from msrl_jax.agents.action_spaces import check_discrete_or_bounded
from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at
from msrl_jax.agents.optimizers import for_each_network, make_optimizer
from msrl_jax.configs.config import (
    Activation,
    CodecName,
    NetworkKind,
    OptimizerKind,
    Tunable,
    TunableOrNone,
    config,
    field,
    tunable,
)
from msrl_jax.envs import Box, Discrete, Environment
from msrl_jax.envs.actions import action_transform, uniform_actions
from msrl_jax.envs.masks import only_legal
from msrl_jax.envs.privileged import are_privileged
from msrl_jax.envs.spaces import zeros
from msrl_jax.fragments import fragment
from msrl_jax.loops.data_field import check_data
from msrl_jax.loops.offline import OfflineState, check_has_data, draw, learn_from, playing_env, read_data, state_axes
from msrl_jax.losses.conservative import conservative_gap, log_partition
from msrl_jax.losses.entropy import soft_value, temperature_loss
from msrl_jax.networks.continuous_policies import TanhNormal, tanh_policy
from msrl_jax.networks.distributions import choose
from msrl_jax.networks.heads import make_critics
from msrl_jax.networks.q_network import greedy_target, q_network
from msrl_jax.networks.torso import make_torso
from msrl_jax.replay import NStep


@config("cql", offline=True, privileged=True, actions=("discrete", "bounded"))
class CQL:
    """Conservative Q-learning; for actions that are discrete or bounded floats.

    The policy and the critics have the same learning rate. The paper's code learns the policy at a lower rate.
    """

    tau: Tunable = tunable(default=0.005, above=0, high=1, doc="target update rate (Polyak). Usual: 0.001 to 0.05.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    data: str | None = field(default=None, doc="path of the data set, or a `msrl_jax.data.Dataset`; training needs it.")
    num_updates: int = field(default=20, doc="updates per iteration, `K`. Usual: 10 to 100.")
    batch_size: int = field(default=256, doc="transitions per update, `B`. Usual: 32 to 512.")
    storage: CodecName | None = field(
        default=None, doc='codec of observations ("scaled_uint8": x / 255). Usual: None, "uint8".'
    )
    shards: int | None = field(default=None, doc="parts of the buffer; None: gcd of `batch_size` and 8. Usual: None.")
    learning_rate: Tunable = tunable(default=0.001, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: Tunable = tunable(default=10.0, above=0, doc="largest norm of each network's gradients. Usual: 10.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (64, 64) to (256, 256).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    validation_fraction: float = field(default=0.1, low=0, below=1, doc="share of episodes held out to validate. Usual: 0.1.")
    conservative_weight: TunableOrNone = tunable(
        default=None,
        low=0,
        doc="weight of the penalty; larger rewards need a larger one. None: 0.5 for discrete actions, 5 for continuous ones. "
        "Usual: 0.1 to 10.",
    )
    target_gap: TunableOrNone = tunable(
        default=None,
        doc="target of the gap that the penalty lowers, whose weight is then learned (the paper's Lagrange variant); for "
        "continuous actions. Usual: None, or 5 to 10.",
    )
    num_samples: int = field(
        default=4,
        doc="actions drawn at random, from the policy now and one step later, each, to estimate the soft maximum, `S`; for "
        "continuous actions. Usual: 4 to 10.",
    )
    initial_temperature: float = tunable(default=1.0, above=0, once=True, doc="initial weight of the entropy. Usual: 0.1 to 1.")
    learn_temperature: bool = field(default=True, doc="whether the temperature is learned. Usual: True.")
    target_entropy: TunableOrNone = tunable(default=None, doc="in nats; None: minus the length of an action. Usual: None.")
    double: bool = field(default=True, doc="whether the online network chooses a target's action (discrete ones). Usual: True.")

    def check(self) -> None:
        """Raises ValueError if `data` or `data_fraction` is invalid, or if a learned weight starts at 0."""
        check_data(self)
        if self.target_gap is not None and self.conservative_weight == 0:
            raise ValueError("CQL.conservative_weight=0 cannot be learned; use a weight above 0, or target_gap=None")

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space, a size or the data do not fit."""
        action_space = check_discrete_or_bounded(type(self).__name__, env.action_space)
        source = read_data(env, self, discount=self.discount)
        venv, to_env_action = playing_env(env, self.batch_size, self.shards), action_transform(action_space)
        if isinstance(action_space, Discrete):
            networks = value_networks(env, action_space, self)
        else:
            networks = actor_critic_networks(env, action_space, self)
        optimizer = networks.optimizer

        @fragment(role="learner")
        def gradients(params, target_params, batch, key):
            loss = networks.make_loss(params, target_params, batch, key)
            return jax.grad(loss, has_aux=True)(params)

        @fragment(role="buffer")
        def sample_batches(data, key):
            assert source is not None
            return draw(source, data, key, self.num_updates)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate):
            updates, opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
            return optax.apply_updates(params, updates), opt_state

        @fragment(role="server")
        def update_target(target_params, params):
            return optax.incremental_update(params, target_params, self.tau)

        @fragment(role="learner")
        def learn(learner, progress, key, batches, held_out):
            def update(learner, batch, key, progress):
                params, target_params, opt_state = learner
                grads, stats = gradients(params, target_params, batch, key)
                params, opt_state = apply_update(params, opt_state, grads, learning_rate_at(self, progress))
                return (params, update_target(target_params, networks.target(params)), opt_state), stats

            return learn_from(batches, held_out, update, learner, key, progress)

        def iteration(state: OfflineState, progress: Progress) -> tuple[OfflineState, Metrics]:
            check_has_data(self, state)
            data_key, batches, held_out = sample_batches(state.data, state.data_key)
            learner = state.params, state.target_params, state.opt_state
            (params, target_params, opt_state), key, metrics = learn(learner, progress, state.key, batches, held_out)
            return OfflineState(params, target_params, opt_state, key, data_key, data=state.data), metrics

        def init(key: jax.Array) -> OfflineState:
            params_key, learner_key, data_key = jax.random.split(key, 3)
            params = networks.init(params_key, zeros(env.observation_space))
            target_params = jax.tree.map(jnp.copy, networks.target(params))
            return OfflineState(params, target_params, optimizer.init(params), learner_key, data_key)

        def act(state: OfflineState, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
            return to_env_action(networks.choose(state.params, obs, key)), carry

        return Agent(
            init=init,
            iteration=iteration,
            act=act,
            axes=state_axes(source),
            steps_per_iteration=self.num_updates,
            updates_per_iteration=self.num_updates,
            env=venv,
            data={} if source is None else {"data": source.data},
            unit="updates",
        )


class Networks(NamedTuple):
    """The networks of CQL for discrete or for continuous actions, as pure functions."""

    init: Callable[[jax.Array, Any], Any]  # (key, obs [B, ...]) -> params
    optimizer: optax.GradientTransformationExtraArgs
    target: Callable[[Any], Any]  # params -> the parameters that target parameters track
    # (params, target_params, batch, key) -> (trained params -> (loss, statistics)); gradients flow through `trained` only
    make_loss: Callable[[Any, Any, NStep, jax.Array], Callable[[Any], tuple[jax.Array, dict[str, jax.Array]]]]
    choose: Callable[[Any, Any, jax.Array | None], jax.Array]  # (params, obs [B, ...], key) -> actions; the best if key is None


def value_networks(env: Environment, action_space: Discrete, config: CQL) -> Networks:
    """Makes double DQN with the penalty added to the loss of every example."""
    if are_privileged(env.observation_space):
        raise TypeError(
            f"CQL of discrete actions ({action_space}) acts by the values, so nothing may see the environment's "
            "privileged_state; use iql, or train in msrl.envs.Unprivileged(env)"
        )
    if config.target_gap is not None:
        raise ValueError(
            f"CQL.target_gap={config.target_gap} does not work for discrete actions ({action_space}); use "
            "target_gap=None and a conservative_weight"
        )
    weight = 0.5 if config.conservative_weight is None else config.conservative_weight
    network = q_network(make_torso(env.observation_space, config), action_space)

    def values(params, obs):
        return network.apply(params, obs)[..., 0]

    def make_loss(params, target_params, e, key):
        next_target = values(target_params, e.next_obs)
        next_online = values(params, e.next_obs) if config.double else next_target
        target = e.reward + e.discount * jax.vmap(greedy_target)(only_legal(next_online, e.next_obs), next_target)

        def loss(params):
            q = values(params, e.obs)
            action_value = jnp.take_along_axis(q, e.action[:, None], 1)[:, 0]
            gap = conservative_gap(only_legal(q, e.obs), e.action)
            losses = optax.l2_loss(action_value, target) + weight * gap
            stats = {"value": action_value.mean(), "conservative_gap": gap.mean(), "loss": losses.mean()}
            return losses.mean(), stats

        return loss

    def choose_best(params, obs, key):
        return only_legal(values(params, obs), obs).argmax(-1).astype(jnp.int32)

    return Networks(network.init, make_optimizer(config, epsilon=1e-5), lambda params: params, make_loss, choose_best)


def actor_critic_networks(env: Environment, action_space: Box, config: CQL) -> Networks:
    """Makes SAC with the penalty added to the loss of the critics."""
    policy = tanh_policy(env.observation_space, action_space, config)
    critics = make_critics(env.observation_space, action_space, 2, config)
    size, count = math.prod(action_space.shape), config.num_samples
    target_entropy = -float(size) if config.target_entropy is None else config.target_entropy
    first_weight = 5.0 if config.conservative_weight is None else config.conservative_weight

    def init(key: jax.Array, obs: jax.Array) -> dict[str, Any]:
        actor_key, critic_key = jax.random.split(key)
        params = {
            "actor": policy.init(actor_key, obs),
            "critic": critics.init(critic_key, obs),
            "log_temperature": jnp.log(jnp.float32(config.initial_temperature)),
        }
        if config.target_gap is not None:
            params["log_weight"] = jnp.log(jnp.float32(first_weight))
        return params

    def draw(actor, obs, keys):
        """Draws actions from the policy; returns them and their log-probabilities."""
        distribution = policy.apply(actor, obs)
        assert isinstance(distribution, TanhNormal)
        return distribution.sample_and_log_prob(keys)

    def draw_many(actor, e, keys):
        """Draws actions `[B, 3 * S, D]` with keys `[B, 3 * S]`; returns them and their log-densities."""
        uniform = jax.vmap(lambda keys: uniform_actions(keys, action_space))(keys[:, :count])
        samples = [(uniform, jnp.full(uniform.shape[:-1], -size * math.log(2)))]
        for i, obs in enumerate((e.obs, e.next_obs), 1):
            samples.append(draw(actor, jax.tree.map(lambda x: x[:, None], obs), keys[:, i * count : (i + 1) * count]))
        actions, log_probs = zip(*samples, strict=True)
        return jnp.concatenate(actions, 1), jnp.concatenate(log_probs, 1)

    def make_loss(params, target_critic, e, key):
        temperature = jnp.exp(params["log_temperature"])
        next_keys, now_keys, *many_keys = jax.random.split(key, (2 + 3 * count, len(e.reward)))
        next_action, next_log_prob = draw(params["actor"], e.next_obs, next_keys)
        next_q = critics.apply(target_critic, e.next_obs, next_action).min(0)
        target = e.reward + e.discount * soft_value(next_q, next_log_prob, temperature)
        sampled_actions, sampled_log_prob = draw_many(params["actor"], e, jnp.stack(many_keys, 1))
        repeated_obs = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (*sampled_actions.shape[:2], *x.shape[1:])), e.obs)

        def loss(trained):
            q = critics.apply(trained["critic"], e.obs, e.action)
            critic_loss = jax.vmap(optax.l2_loss, (0, None))(q, target).sum(0).mean()
            action, log_prob = draw(trained["actor"], e.obs, now_keys)
            soft = soft_value(critics.apply(params["critic"], e.obs, action).min(0), log_prob, temperature)
            total = critic_loss - soft.mean()
            if config.learn_temperature:
                total += temperature_loss(trained["log_temperature"], log_prob, target_entropy).mean()

            gap = log_partition(critics.apply(trained["critic"], repeated_obs, sampled_actions), sampled_log_prob) - q
            stats = {"conservative_gap": gap.mean()}
            if config.target_gap is None:
                total += first_weight * gap.sum(0).mean()
            else:
                weight = jnp.exp(params["log_weight"])
                weight_loss = temperature_loss(trained["log_weight"], gap, -config.target_gap).mean()
                total += weight * (gap - config.target_gap).sum(0).mean() + weight_loss
                stats["conservative_weight"] = weight
            stats |= {
                "loss": total,
                "critic_loss": critic_loss,
                "actor_loss": -soft.mean(),
                "q": q.mean(),
                "entropy": -log_prob.mean(),
                "temperature": temperature,
            }
            return total, stats

        return loss

    def choose_action(params, obs, key):
        return choose(policy.apply(params["actor"], obs), key)

    optimizer = for_each_network(make_optimizer(config, epsilon=1e-8))
    return Networks(init, optimizer, lambda params: params["critic"], make_loss, choose_action)
