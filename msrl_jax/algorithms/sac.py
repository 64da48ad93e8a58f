"""Soft actor-critic (Haarnoja et al., 2018, arXiv 1801.01290, 1812.05905), and a variant for discrete actions (1910.07207).

The loop and the update are in `loops/off_policy.py`. In the shape descriptions, `B` is `batch_size`
and `C` the number of critics. One update takes all gradients at the same parameters, so that devices exchange gradients once.
The papers update the critics first.
"""

import math
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp

from msrl_jax import envs
from msrl_jax.algorithms.agent import Agent
from msrl_jax.algorithms.config import (
    Activation,
    CoreKind,
    NetworkKind,
    OptimizerKind,
    Tunable,
    TunableOrNone,
    config,
    field,
    tunable,
)
from msrl_jax.algorithms.loops.buffers import check_data, check_discrete_or_bounded
from msrl_jax.algorithms.loops.memories import check_memory, remembered, with_memory
from msrl_jax.algorithms.loops.normalized import normalized, seen_space
from msrl_jax.algorithms.loops.off_policy import Carry, for_each_network, gradient_rule, off_policy_agent, uniform_actions
from msrl_jax.algorithms.losses.critics import prediction_of
from msrl_jax.algorithms.losses.distributional import check_support
from msrl_jax.algorithms.networks.batch_norm import check_batch_norm, critics_of_batch, initial_statistics
from msrl_jax.algorithms.networks.distributions import Categorical, choose
from msrl_jax.algorithms.networks.policies import make_critics, make_policy
from msrl_jax.algorithms.optimizers import make_optimizer
from msrl_jax.algorithms.options import C51, TQC, Expected, Hindsight, Replay
from msrl_jax.envs import Discrete, Environment
from msrl_jax.envs.masks import mask_of
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import Counter, at_least


@config("sac", privileged=True)
class SAC:
    """Soft actor-critic; for actions that are discrete or bounded floats.

    The defaults are the papers', except for 1/2 instead of 1 update per step and the learning rate.
    """

    num_envs: int = field(default=16, doc="environments stepped in parallel, `E`. Usual: 1 to 256.")
    unroll_length: int = field(default=2, doc="steps of every environment per iteration, `T`. Usual: 1 to 40.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    num_updates: int = field(default=16, doc="updates per iteration, `K`. Usual: 1/8 to 1 per environment step.")
    batch_size: int = field(default=256, doc="transitions, or windows, per update, `B`. Usual: 32 to 512.")
    data: str | None = field(default=None, doc="path of a data set to mix in, or a `msrl_jax.data.Dataset`. Usual: None.")
    data_fraction: float = field(default=0.5, above=0, high=1, doc="share of `data` in a batch, rounded per shard. Usual: 0.5.")
    replay: Replay = field(default=Replay(200_000), doc="the buffer. Usual: 1e4 to 1e6 steps.")
    hindsight: Hindsight | None = field(default=None, doc="goals of sampled steps that were achieved later. Usual: None.")
    learning_rate: Tunable = tunable(default=0.001, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=False, doc="whether the learning rate falls linearly to 0. Usual: False.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: TunableOrNone = tunable(default=None, above=0, doc="largest norm of each network's gradients. Usual: None.")
    tau: Tunable = tunable(default=0.005, above=0, high=1, doc="share that targets move per update. Usual: 0.001 to 0.05.")
    hidden_sizes: tuple[int, ...] = field(default=(256, 256), doc="widths of dense layers. Usual: (256, 256).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    batch_norm: bool = field(default=False, doc="whether critics are normalized, without targets (CrossQ). Usual: False.")
    core: Literal["none"] | CoreKind = field(default="none", doc='a memory, learned from sequences. Usual: "none", or "gru".')
    memory_size: int = field(default=64, doc="size of each recurrent state, `H`. Usual: 64 to 256.")
    burn_in: int = field(default=8, low=0, doc="first steps of a window, which only refresh the stored carry. Usual: 0 to 40.")
    trace_length: int = field(default=32, doc="steps of a window in the loss; windows overlap by half. Usual: 16 to 80.")
    normalize_observations: bool = field(default=False, doc="standardize by running statistics. Usual: True for locomotion.")
    num_critics: int = field(default=2, doc='number of critics, `C`. Usual: 2, or 5 with "qr".')
    returns: Expected | C51 | TQC = field(default=Expected(), doc="what critics predict of a return. Usual: expected.")
    initial_temperature: float = tunable(default=1.0, above=0, once=True, doc="initial weight of the entropy. Usual: 0.1 to 1.")
    learn_temperature: bool = field(default=True, doc="whether the temperature is learned. Usual: True.")
    target_entropy: TunableOrNone = tunable(
        default=None,
        doc="target entropy in nats. None takes minus the length of a continuous action, or half the logarithm of the number "
        "of legal discrete actions (the paper takes 98 %, which is almost random). Usual: None.",
    )

    def check(self) -> None:
        """Raises ValueError unless the data are some, and the distribution of the critics has limits and targets."""
        check_data(self)
        check_memory(self)
        check_support(self)
        check_batch_norm(self)

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space, a size or the data do not fit."""
        action_space = check_discrete_or_bounded("sac", env.action_space)
        check_batch_norm(self, action_space)
        venv = envs.EpisodeStatistics(envs.vectorize(env, self.num_envs))
        obs_space = seen_space(self, venv.observation_space)
        policy = with_memory("actor", obs_space, self, lambda seen: make_policy(seen, action_space, self))
        predicted = prediction_of(self, action_space)
        size = {"num_outputs": predicted.num_outputs}
        critics = with_memory(
            "critic", obs_space, self, lambda seen: make_critics(seen, action_space, self.num_critics, self, **size)
        )
        optimizer = for_each_network(make_optimizer(self, epsilon=1e-8))

        def init(key: jax.Array, obs: jax.Array) -> dict[str, Any]:
            actor_key, critic_key = jax.random.split(key)
            return {
                "actor": policy.init(actor_key, obs),
                "critic": critics.init(critic_key, obs),
                "log_temperature": jnp.log(jnp.float32(self.initial_temperature)),
            }

        def target_entropy(obs):
            if self.target_entropy is not None:
                return self.target_entropy
            if not isinstance(action_space, Discrete):
                return -float(math.prod(action_space.shape))
            legal = mask_of(obs)
            return 0.5 * math.log(action_space.n) if legal is None else 0.5 * jnp.log(jnp.maximum(legal.sum(-1), 1))

        def consider(distribution, obs, temperature, keys):
            """What critics see of a policy, and the function from values to soft values `[B]` and log-probabilities `[B]`.

            They are those of drawn actions, or expectations if actions are discrete.
            """
            if isinstance(distribution, Categorical):

                def soften(q):
                    return expected_soft_value(q, jax.nn.log_softmax(distribution.logits), temperature, mask_of(obs))

                return (obs,), soften
            action, log_prob = distribution.sample_and_log_prob(keys)
            return (obs, action), lambda q: (soft_value(q, log_prob, temperature), log_prob)

        @fragment(role="learner")
        def gradients(params, target_critic, batch):
            e, temperature = batch.experience, jnp.exp(params["log_temperature"])
            next_keys, keys = jax.random.split(batch.key, (2, len(e.reward)))
            next_policy = policy.apply(params["actor"], e.next_obs)
            next_inputs, soften_next = consider(next_policy, e.next_obs, temperature, next_keys)

            def backup(next_q):
                return predicted.target(next_q, lambda q: e.reward + e.discount * soften_next(q)[0])

            inputs = e.obs, e.action
            judge, predict = critics_of_batch(self, critics, params["critic"], target_critic, inputs, next_inputs, backup)

            # Gradients flow through `trained` only; the loss treats `params` as constants.
            def loss(trained):
                q, target, *statistics = predict(trained["critic"])
                critic_loss = (batch.weight * predicted.loss(q, target).sum(0)).mean()
                distribution = policy.apply(trained["actor"], e.obs)
                new_inputs, soften = consider(distribution, e.obs, temperature, keys)
                soft, log_prob = soften(predicted.value(critics.apply(judge, *new_inputs)))
                total = critic_loss - soft.mean()
                if self.learn_temperature:
                    total += temperature_loss(trained["log_temperature"], log_prob, target_entropy(e.obs)).mean()
                stats = {
                    "critic_loss": critic_loss,
                    "actor_loss": -soft.mean(),
                    "q": predicted.expected(q).mean(),
                    "entropy": -log_prob.mean(),
                    "temperature": temperature,
                }
                return total, (predicted.error(q, target), stats, *statistics)

            return jax.grad(loss, has_aux=True)(params)

        def choose_action(params: Any, obs: jax.Array, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
            return choose(policy.apply(params["actor"], obs), key), carry

        def explore(params: Any, obs: jax.Array, keys: jax.Array, steps: Counter, carry: Carry) -> tuple[jax.Array, Carry]:
            explored = policy.apply(params["actor"], obs).sample(keys)
            return jnp.where(at_least(steps, buffer.min_size), explored, uniform_actions(keys, action_space, obs)), carry

        def target(params):
            return initial_statistics(params["critic"]) if self.batch_norm else params["critic"]

        rule = gradient_rule(self, optimizer, init, gradients, choose_action, target=target)
        buffer, acting = remembered(self, env, rule, explore, actor=policy, critic=critics)
        return off_policy_agent(self, venv, buffer, *normalized(self, *acting))


def soft_value(q: jax.Array, log_prob: jax.Array, temperature: jax.Array) -> jax.Array:
    """The soft value of actions drawn from a policy (arXiv 1812.05905, eq. 3); its negative is the actor's loss (eq. 7)."""
    chex.assert_equal_shape((q, log_prob))
    chex.assert_rank(temperature, 0)
    return q - temperature * log_prob


def expected_soft_value(
    q: jax.Array, log_probs: jax.Array, temperature: jax.Array, legal: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The soft value `[...]` of a discrete policy (arXiv 1910.07207, eq. 10), and its expected log-probability."""
    chex.assert_equal_shape((q, log_probs))
    chex.assert_rank(temperature, 0)
    probs = jnp.exp(log_probs)
    if legal is not None:
        log_probs = jnp.where(legal, log_probs, 0.0)  # an action of probability 0 adds nothing
    return jnp.sum(probs * (q - temperature * log_probs), axis=-1), jnp.sum(probs * log_probs, axis=-1)


def temperature_loss(log_temperature: jax.Array, log_prob: jax.Array, target_entropy: float | jax.Array) -> jax.Array:
    """The loss that raises the temperature while the entropy is below its target, in nats (arXiv 1812.05905, eq. 18)."""
    chex.assert_rank(log_temperature, 0)
    return -jnp.exp(log_temperature) * (jax.lax.stop_gradient(log_prob) + target_entropy)
