"""Implicit Q-learning (Kostrikov et al., 2021, arXiv 2110.06169): evaluates only the actions in the data.

With `critic="of_policy"` it is AWAC (Nair et al., 2020, arXiv 2006.09359): critics evaluate actions of the policy, and there is
no value network. With several of these actions, and with `weighting="binary"` or the best of them as the `baseline`, it is CRR
(Wang et al., 2020, arXiv 2006.15134). In the shape descriptions, `B` is `batch_size` and `C` denotes the two critics. One
update computes all gradients at the same parameters, so that devices exchange gradients only once. The paper's code updates the
networks one after another.
"""

from typing import Any, Literal

import chex
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
from msrl_jax.configs.options import option
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.spaces import zeros
from msrl_jax.fragments import fragment
from msrl_jax.loops.data_field import check_data
from msrl_jax.loops.offline import OfflineState, check_has_data, draw, learn_from, playing_env, read_data, state_axes
from msrl_jax.networks.continuous_policies import heads_of, log_likelihood
from msrl_jax.networks.distributions import Categorical, choose
from msrl_jax.networks.heads import make_value


@option
class Expectile:
    """Targets use an expectile of the values of actions in the data."""

    expectile: Tunable = tunable(
        default=0.7, low=0, high=1, doc="expectile of the data's values; 0.5: mean. Usual: 0.7 to 0.9."
    )


@option
class OfPolicy:
    """Targets use the values of the policy's actions (AWAC, CRR)."""

    num_actions: int = field(default=1, doc="sampled actions of the policy whose values are averaged. Usual: 1, 4 (CRR).")
    baseline: Literal["mean", "max"] = field(
        default="mean", doc='baseline of advantages: the mean or the best value of the policy\'s actions. Usual: "mean".'
    )


@option
class Exponential:
    """The weight of an action is the exponential of its advantage."""

    inverse_temperature: Tunable = tunable(
        default=3.0, low=0, doc="weight of the advantage; 0 clones behavior. Usual: 3 to 10."
    )
    max_weight: Tunable = tunable(default=100.0, above=0, doc="largest weight; 1 for an advantage of 0. Usual: 100.")


@option
class Binary:
    """The weight of an action is 1 if its advantage is above 0, else 0 (CRR)."""


@config("iql", offline=True, privileged=True, actions=("discrete", "bounded"))
class IQL:
    """Implicit Q-learning; for actions that are discrete or bounded floats.

    The defaults are the paper's for locomotion, except for smaller networks, which learn faster. The policy's standard
    deviation depends on the observation; the paper's does not.
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
    max_grad_norm: TunableOrNone = tunable(default=None, above=0, doc="largest norm of each network's gradients. Usual: None.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (64, 64) to (256, 256).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    validation_fraction: float = field(default=0.1, low=0, below=1, doc="share of episodes held out to validate. Usual: 0.1.")
    normalize_rewards: bool = field(
        default=True,
        doc="whether rewards are divided by the range of the episodes' returns over the length of the longest episode, so "
        "that `weighting.inverse_temperature` does not depend on units. Usual: True.",
    )
    critic: Expectile | OfPolicy = field(default=Expectile(), doc="what targets value. Usual: expectile.")
    weighting: Exponential | Binary = field(default=Exponential(), doc="weights of actions. Usual: exponential.")

    check = check_data

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space, a size or the data do not fit."""
        action_space = check_discrete_or_bounded(type(self).__name__, env.action_space)
        heads = heads_of(action_space)
        policy = heads.policy(env.observation_space, action_space, self)
        critics = heads.critics(env.observation_space, action_space, 2, self)
        kind, weighting = self.critic, self.weighting
        value = make_value(env.observation_space, self) if isinstance(kind, Expectile) else None
        baseline = jnp.max if isinstance(kind, OfPolicy) and kind.baseline == "max" else jnp.mean
        source = read_data(env, self, discount=self.discount, normalize_rewards=self.normalize_rewards)
        venv, to_env_action = playing_env(env, self.batch_size, self.shards), action_transform(action_space)
        optimizer = for_each_network(make_optimizer(self, epsilon=1e-8))

        def value_of(params, critic, obs, keys, average=jnp.mean):
            """Returns values `[B]` of observations: network outputs, or values of sampled actions, or expectations."""
            if value is not None:
                return value.apply(params["value"], obs)
            distribution = policy.apply(params["actor"], obs)
            if isinstance(distribution, Categorical) and average is jnp.mean:
                return jnp.sum(distribution.probabilities() * critics.apply(critic, obs).min(0), axis=-1)
            return average(jax.vmap(lambda keys: critics.apply(critic, obs, distribution.sample(keys)).min(0))(keys), axis=0)

        @fragment(role="learner")
        def gradients(params, target_critic, e, key):
            (next_keys, keys), q_params = (None, None), target_critic
            if isinstance(kind, OfPolicy):  # the online critics evaluate the policy, as in AWAC's code
                (next_keys, keys), q_params = jax.random.split(key, (2, kind.num_actions, len(e.reward))), params["critic"]
            target = e.reward + e.discount * value_of(params, target_critic, e.next_obs, next_keys)
            action_value = critics.apply(q_params, e.obs, e.action).min(0)
            advantage = action_value - value_of(params, q_params, e.obs, keys, baseline)
            weight = (
                (advantage > 0).astype(jnp.float32)
                if isinstance(weighting, Binary)
                else advantage_weight(advantage, weighting.inverse_temperature, weighting.max_weight)
            )

            def loss(trained):
                q = critics.apply(trained["critic"], e.obs, e.action)
                losses = {"critic_loss": jax.vmap(optax.l2_loss, (0, None))(q, target).sum(0).mean()}
                if value is not None and isinstance(kind, Expectile):
                    error = action_value - value.apply(trained["value"], e.obs)
                    losses["value_loss"] = expectile_loss(error, kind.expectile).mean()
                losses["actor_loss"] = -(weight * log_likelihood(policy.apply(trained["actor"], e.obs), e.action)).mean()
                total = jnp.stack([*losses.values()]).sum()
                stats = losses | {"loss": total, "q": q.mean(), "advantage": advantage.mean(), "weight": weight.mean()}
                return total, stats

            return jax.grad(loss, has_aux=True)(params)

        @fragment(role="buffer")
        def sample_batches(data, key):
            assert source is not None
            return draw(source, data, key, self.num_updates)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate) -> tuple[Any, Any]:
            updates, opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
            return optax.apply_updates(params, updates), opt_state

        @fragment(role="server")
        def update_target(target_params, params):
            return optax.incremental_update(params, target_params, self.tau)

        @fragment(role="learner")
        def learn(learner, progress, key, batches, held_out):
            def update(learner, batch, key, progress):
                params, target_critic, opt_state = learner
                grads, stats = gradients(params, target_critic, batch, key)
                params, opt_state = apply_update(params, opt_state, grads, learning_rate_at(self, progress))
                return (params, update_target(target_critic, params["critic"]), opt_state), stats

            return learn_from(batches, held_out, update, learner, key, progress)

        def iteration(state: OfflineState, progress: Progress) -> tuple[OfflineState, Metrics]:
            check_has_data(self, state)
            data_key, batches, held_out = sample_batches(state.data, state.data_key)
            learner = state.params, state.target_params, state.opt_state
            (params, target_params, opt_state), key, metrics = learn(learner, progress, state.key, batches, held_out)
            return OfflineState(params, target_params, opt_state, key, data_key, data=state.data), metrics

        def init(key: jax.Array) -> OfflineState:
            params_key, learner_key, data_key = jax.random.split(key, 3)
            (actor_key, critic_key, value_key), obs = jax.random.split(params_key, 3), zeros(env.observation_space)
            params = {"actor": policy.init(actor_key, obs), "critic": critics.init(critic_key, obs)}
            if value is not None:
                params["value"] = value.init(value_key, obs)
            target_critic = jax.tree.map(jnp.copy, params["critic"])
            return OfflineState(params, target_critic, optimizer.init(params), learner_key, data_key)

        def act(state: OfflineState, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
            return to_env_action(choose(policy.apply(state.params["actor"], obs), key)), carry

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


def expectile_loss(error: jax.Array, expectile: float) -> jax.Array:
    """Returns the asymmetric squared error, with weight `expectile` above 0, else `1 - expectile` (arXiv 2110.06169, eq. 4)."""
    chex.assert_type(error, float)
    return jnp.where(error > 0, expectile, 1 - expectile) * jnp.square(error)


def advantage_weight(advantage: jax.Array, inverse_temperature: float, max_weight: float) -> jax.Array:
    """Returns the weight of an action in imitation: `exp(inverse_temperature * advantage)`, capped at `max_weight` (eq. 7)."""
    chex.assert_type(advantage, float)
    return jnp.minimum(jnp.exp(inverse_temperature * jax.lax.stop_gradient(advantage)), max_weight)
