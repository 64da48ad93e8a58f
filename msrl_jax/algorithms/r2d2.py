"""R2D2: deep Q-learning with a memory, from replayed sequences (Kapturowski et al., 2019).

"Recurrent Experience Replay in Distributed Reinforcement Learning", https://openreview.net/forum?id=r1lyTjAqYX.

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs`, `K` is `num_updates`, `B` is `batch_size`, `A` is the
number of actions, `H` is `memory_size`, `L` is `trace_length` and `S` the length of a window: first `burn_in` steps that do no
more than refresh the memory with which the window was acted, then `L` steps that are learned from, then the `n_step - 1` steps
that the targets of the last of them look ahead.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax import envs
from msrl_jax.algorithms.base import Agent, Algorithm, register
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.loops.acting import flatten, unflatten
from msrl_jax.algorithms.loops.exploration import (
    check_acting,
    check_choices,
    epsilon_greedy,
    importance_exponent,
    learning_rate_of,
    replay_buffer,
    transition_of,
)
from msrl_jax.algorithms.loops.off_policy import Learner, RecurrentTransition, off_policy_agent
from msrl_jax.algorithms.loops.optimizer import make_optimizer
from msrl_jax.algorithms.loops.q_learning import make_update
from msrl_jax.algorithms.losses import value_loss
from msrl_jax.algorithms.losses.q_learning import greedy_target, huber, rescale, sequence_priority, unrescale
from msrl_jax.algorithms.networks.recurrent import CELLS, Carry, RecurrentNetwork, recurrent_q_network
from msrl_jax.algorithms.returns import n_step_return
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment
from msrl_jax.replay import Replay


@dataclasses.dataclass(frozen=True)
class R2D2Config:
    """Everything about what R2D2 computes; where it runs is a distribution policy's concern.

    An iteration takes `unroll_length` steps of every environment, then makes `num_updates` updates. The defaults are for small
    tasks on a CPU. What differs from the paper besides: windows go on over the ends of episodes, where the memory is cleared,
    and time limits bootstrap; the network sees neither the last action nor the last reward; a new window has the largest
    priority so far, not one from the actor's own errors.

    Attributes:
      num_envs: environments stepped in parallel, `E`. Usual: 1 to 256.
      unroll_length: steps of every environment per iteration, `T`. Usual: 4 to 40.
      num_updates: updates per iteration, `K`. Usual: such that a step is learned from 1 to 32 times.
      batch_size: windows per update, `B`. Usual: 16 to 64.
      capacity: environment steps that the replay buffer holds at most. Usual: 1e4 to 4e6.
      learning_starts: environment steps, of random actions, before the first update; None for as many as a batch needs.
        Usual: 1e3 to 5e4.
      storage: how observations are stored: "uint8" for whole numbers from 0 to 255, "scaled_uint8" for such over 255,
        "bfloat16", or None for as they are; the metric `replay_lost` counts what a codec could not hold. Usual: None, or
        "uint8" for images.
      shards: parts of the buffer, which may lie on different devices; a divisor of `num_envs` and `batch_size`. None for the
        most, 8 at most. Usual: None.
      burn_in: steps before those that are learned from, which refresh the stored memory; 0 trusts it as it is. Usual: 0 to 40.
      trace_length: steps of a window that are learned from, `L`, and the most that gradients flow back; windows overlap by
        half of them. Usual: 16 to 80.
      n_step: rewards before the target bootstraps. Usual: 1 to 5.
      rescale_epsilon: of the function `sign(x) (sqrt(|x| + 1) - 1) + epsilon x` of the return (Pohlen et al., 2018, arXiv
        1805.11593) that is learned instead of the return; None learns the return. Usual: 1e-3 for rewards of any size, or None.
      prioritised: whether windows are drawn by their last errors. Usual: True.
      alpha: from 0, all alike, to 1, in proportion to their errors. Usual: 0.6 to 0.9.
      beta: how far importance weights make up for that at first; it rises to 1 over `total_steps`, if they are given. None
        weighs all alike. Usual: None, or 0.4 to 0.6.
      eta: the weight of the largest error of a window in its priority, against that of their mean. Usual: 0.9.
      exploration: "annealed", by one probability of random actions that falls; or "per_env", by one for each environment.
        Usual: "per_env" with many environments.
      exploration_steps: environment steps over which the probability falls from 1, linearly. Usual: a tenth of the run.
      final_epsilon: the probability it falls to. Usual: 0.01 to 0.1.
      base_epsilon: of "per_env", where environment `i` acts at random with probability `base_epsilon ** (1 + 7 i / (E - 1))`.
        Usual: 0.4.
      actor_period: iterations between two refreshes of the parameters that act. Usual: 1.
      learning_rate: step size of Adam. Usual: 1e-4 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`, if they are given. Usual: True.
      discount: the factor per step. Usual: 0.99 to 0.997.
      huber_delta: the error from which on the loss is no longer quadratic but linear; None never is. Usual: None.
      target_period: updates between two moves of the target network. Usual: 1 with a small `tau`, or 100 to 2,500.
      tau: how far it moves towards the online network. Usual: 1, or 0.005 to 0.05 with a period of 1.
      adam_epsilon: what keeps Adam's division finite. Usual: 1e-8 to 1e-3.
      max_grad_norm: gradients are scaled down to this global norm. Usual: 10 to 40.
      core: "gru" or "lstm". Usual: "lstm".
      memory_size: size of the memory, `H`. Usual: 64 to 512.
      dueling: whether the head has streams for values and for advantages, of one dense layer each. Usual: True.
      hidden_sizes: widths of the dense layers before the core; streams are as wide as the last. Usual: (64,), or (128,) after a
        convolution.
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
      network: "mlp", "cnn", or "auto", which convolves observations of three dimensions. Usual: "auto".
      total_steps: environment steps over which `beta` rises and the learning rate falls; both stay as they are if it is None.
    """

    num_envs: int = 16
    unroll_length: int = 16
    num_updates: int = 4
    batch_size: int = 32
    capacity: int = 50_000
    learning_starts: int | None = 2_000
    storage: str | None = None
    shards: int | None = None
    burn_in: int = 8
    trace_length: int = 32
    n_step: int = 5
    rescale_epsilon: float | None = None
    prioritised: bool = True
    alpha: float = 0.9
    beta: float | None = None
    eta: float = 0.9
    exploration: str = "annealed"
    exploration_steps: int = 20_000
    final_epsilon: float = 0.05
    base_epsilon: float = 0.4
    actor_period: int = 1
    learning_rate: float = 1e-3
    anneal_learning_rate: bool = True
    discount: float = 0.99
    huber_delta: float | None = None
    target_period: int = 1
    tau: float = 0.02
    adam_epsilon: float = 1e-5
    max_grad_norm: float = 10.0
    core: str = "gru"
    memory_size: int = 64
    dueling: bool = True
    hidden_sizes: tuple[int, ...] = (64,)
    activation: str = "relu"
    network: str = "auto"
    total_steps: int | None = None

    def __post_init__(self):
        check_acting(self)
        check.check_integers(self, 0, "burn_in")
        check.check_integers(self, 1, "trace_length", "memory_size")
        check.check_numbers(self, "rescale_epsilon", above=0.0)
        check.check_numbers(self, "eta", low=0.0, high=1.0)
        check.check_choice(self, "core", CELLS)


def make_buffer(env: Environment, memory: Carry, config: R2D2Config) -> Replay:
    """Makes the replay buffer, of windows of `RecurrentTransition`.

    Args:
      env: the environment whose steps it holds.
      memory: the memory of one environment. `[H]` each
      config: its size and kind.

    Returns:
      The buffer.

    Raises:
      ValueError: if sizes do not fit each other, or the devices' memory, or if the observations do not fit the storage.
    """
    return replay_buffer(
        RecurrentTransition(*transition_of(env), memory), config, "burn_in + trace_length + n_step - 1 are",
        length=config.burn_in + config.trace_length + config.n_step - 1, stride=max(config.trace_length // 2, 1),
    )  # fmt: skip


def replay_values(
    network: RecurrentNetwork, params: Any, window: RecurrentTransition, burn_in: int
) -> tuple[jax.Array, Carry]:
    """Values along windows, as they would be if the parameters had acted from the stored memory on.

    Args:
      network: the network.
      params: its parameters; no gradient flows to them, nor to anything else, through the burn-in.
      window: windows. `[S, B, ...]`
      burn_in: steps at their begin that refresh the memory.

    Returns:
      Values `[S - burn_in, B, A]` of the later steps, and the memories after them `[S - burn_in, B, H]`.
    """
    ends = window.terminated | window.truncated
    # What is stored with a step is cleared already if an episode began with it.
    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    memory = tuple(m[0] for m in window.memory)
    if burn_in:
        known = jax.lax.stop_gradient((params, window.obs[:burn_in], begins[:burn_in], memory))
        _, memories = network.unroll(*known)
        memory = tuple(m[-1] for m in memories)
    return network.unroll(params, window.obs[burn_in:], begins[burn_in:], memory)


def replay_successors(network: RecurrentNetwork, params: Any, next_obs: jax.Array, memories: Carry) -> jax.Array:
    """Values of the true successors, which where an episode ends are not those of the next step.

    Args:
      network: the network.
      params: its parameters.
      next_obs: the successors. `[T, B, ...]`
      memories: what is remembered before them. `[T, B, H]`

    Returns:
      The values. `[T, B, A]`
    """
    values, _ = network.step(params, flatten(next_obs), tuple(map(flatten, memories)))
    return unflatten(values, len(next_obs))


def sequence_target(
    next_value: jax.Array, window: RecurrentTransition, *, discount: float, num_steps: int, epsilon: float | None
) -> jax.Array:
    """n-step targets along windows, squeezed by `rescale` if they are to be.

    Args:
      next_value: what the target network says of the successors, for the best actions. `[T, B]`
      window: rewards and ends of episodes. `[T, B]`
      discount: the factor per step.
      num_steps: rewards before the target bootstraps, `n`.
      epsilon: that of `rescale`; None if values are returns.

    Returns:
      The targets of all but the last `n - 1` steps. `[T - n + 1, B]`
    """
    if epsilon is not None:
        next_value = unrescale(next_value, epsilon)
    target = n_step_return(
        window.reward, next_value, window.terminated, window.truncated, discount=discount, num_steps=num_steps
    )[: len(next_value) - num_steps + 1]
    return target if epsilon is None else rescale(target, epsilon)


def build(env: Environment, config: R2D2Config) -> Agent:
    """Builds R2D2 for one environment.

    Args:
      env: the environment; its action space is `Discrete`.
      config: what to compute.

    Returns:
      The agent; it acts with a memory.

    Raises:
      ValueError: if the sizes of the buffer do not fit, or if the network does not.
      TypeError: if a space is not supported.
    """
    venv, action_space = envs.EpisodeStatistics(envs.vectorize(env, config.num_envs)), check_choices("R2D2", env.action_space)
    network = recurrent_q_network(venv.observation_space, action_space, config, dueling=config.dueling)
    buffer = make_buffer(env, jax.eval_shape(lambda: network.initial_carry(())), config)
    explore = epsilon_greedy(config, action_space.n, buffer.min_size)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=config.adam_epsilon)

    def init(key: jax.Array, obs: jax.Array) -> Learner:
        params = network.init(key)
        return Learner(params, jax.tree.map(jnp.copy, params), optimizer.init(params))

    def choose_action(params: Any, obs: jax.Array, key: jax.Array | None, memory: Carry) -> tuple[jax.Array, Carry]:
        values, memory = network.step(params, obs, memory)
        return values.argmax(-1).astype(jnp.int32), memory

    def act(params: Any, obs: jax.Array, keys: jax.Array, steps: jax.Array, memory: Carry) -> tuple[jax.Array, Carry]:
        greedy, memory = choose_action(params, obs, None, memory)
        return explore(greedy, keys, steps), memory

    @fragment(role="learner")
    def gradients(params, target_params, window: RecurrentTransition, weight):
        after = jax.tree.map(lambda x: x[config.burn_in :], window)
        _, target_memories = replay_values(network, target_params, window, config.burn_in)
        next_target = replay_successors(network, target_params, after.next_obs, target_memories)

        def loss(params):
            values, memories = replay_values(network, params, window, config.burn_in)
            chooser = replay_successors(network, *jax.lax.stop_gradient((params, after.next_obs, memories)))
            next_value = jax.vmap(jax.vmap(greedy_target))(chooser, next_target)
            target = sequence_target(
                next_value, after, discount=config.discount, num_steps=config.n_step, epsilon=config.rescale_epsilon
            )
            taken = jnp.take_along_axis(values, after.action[..., None], -1)[: config.trace_length, :, 0]
            error = target - taken
            losses = value_loss(taken, target) if config.huber_delta is None else huber(error, config.huber_delta)
            stats = {"loss": losses.mean(), "value": taken.mean()}
            return (weight * losses.mean(0)).mean(), (sequence_priority(error, config.eta), stats)

        return jax.grad(loss, has_aux=True)(params)

    return off_policy_agent(
        venv, buffer, init=init, act=act, update=make_update(gradients, optimizer, learning_rate_of(config), config),
        choose_action=choose_action, to_env_action=lambda action: jnp.asarray(action, action_space.dtype),
        unroll_length=config.unroll_length, num_updates=config.num_updates, batch_size=config.batch_size,
        beta=importance_exponent(config), actor_period=config.actor_period, report_lost=config.storage is not None,
        initial_carry=lambda num_envs: network.initial_carry((num_envs,)),
    )  # fmt: skip


R2D2 = register(Algorithm("r2d2", R2D2Config, build))
