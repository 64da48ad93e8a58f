"""Deep Q-learning (Mnih et al., 2013, arXiv 1312.5602; 2015, Nature 518), the extensions of Rainbow, and Ape-X.

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs`, `K` is `num_updates`, `B` is `batch_size`, `A` is the
number of actions and `N` that of the outputs for each of them: one value, or the atoms or quantiles of a distribution.
"""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax import envs
from msrl_jax.algorithms.base import Agent, Algorithm, register
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.loops.exploration import (
    check_acting,
    check_choices,
    epsilon_greedy,
    importance_exponent,
    learning_rate_of,
    replay_buffer,
    transition_of,
)
from msrl_jax.algorithms.loops.mixing import make_mixture, split_batch
from msrl_jax.algorithms.loops.off_policy import off_policy_agent
from msrl_jax.algorithms.loops.q_learning import q_learning, support
from msrl_jax.envs import Environment
from msrl_jax.replay import Replay


@dataclasses.dataclass(frozen=True)
class DQNConfig:
    """Everything about what DQN computes; where it runs is a distribution policy's concern.

    An iteration takes `unroll_length` steps of every environment, then makes `num_updates` updates. The defaults are for small
    tasks on a CPU: many environments, large batches, Adam and a target network that follows slowly, where the papers have one
    environment, batches of 32, RMSProp and a target network that is copied.

    Attributes:
      num_envs: environments stepped in parallel, `E`. Usual: 1 to 256.
      unroll_length: steps of every environment per iteration, `T`. Usual: 1 to 8.
      num_updates: updates per iteration, `K`. Usual: `num_envs * unroll_length / 4` or fewer, with larger batches.
      batch_size: n-step transitions per update, `B`. Usual: 32 to 512.
      capacity: environment steps that the replay buffer holds at most. Usual: 1e4 to 1e6.
      learning_starts: environment steps, of random actions, before the first update; None for as many as a batch needs.
        Usual: 1e3 to 5e4.
      storage: how observations are stored: "uint8" for whole numbers from 0 to 255, "scaled_uint8" for such over 255,
        "bfloat16", or None for as they are; the metric `replay_lost` counts what a codec could not hold. Usual: None, or
        "uint8" for images.
      shards: parts of the buffer, which may lie on different devices; a divisor of `num_envs` and `batch_size`. None for the
        most, 8 at most. Usual: None.
      n_step: rewards before the target bootstraps. Usual: 1 to 5.
      double: whether the online network chooses the action that the target network values. Usual: True.
      dueling: whether the network has streams for values and for advantages. Usual: True for images.
      distribution: "none" learns values, "c51" the probabilities of returns at fixed atoms, "qr" quantiles of returns.
        Quantiles want a faster step and a slower target: on CartPole-v1 `learning_rate=5e-4` and `tau=0.005`. Usual: "none".
      num_atoms: atoms or quantiles, `N`. Usual: 51 atoms, 32 to 200 quantiles.
      v_min: the lowest atom of "c51"; None for `-1 / (1 - discount)`, the least that rewards of at least -1 can add up to.
        Usual: the least return there is.
      v_max: the highest atom; None for `1 / (1 - discount)`. Usual: the largest return there is.
      prioritised: whether transitions are drawn by their last error. Usual: True for images.
      alpha: from 0, all alike, to 1, in proportion to their errors. Usual: 0.4 to 0.7.
      beta: how far importance weights make up for that at first; it rises to 1 over `total_steps`, if they are given.
        Usual: 0.4 to 0.6.
      exploration: "annealed", by one probability of random actions that falls; or "per_env", by one for each environment.
        Usual: "annealed".
      exploration_steps: environment steps over which the probability falls from 1, linearly. Usual: a tenth of the run.
      final_epsilon: the probability it falls to. Usual: 0.01 to 0.1.
      base_epsilon: of "per_env", where environment `i` acts at random with probability `base_epsilon ** (1 + 7 i / (E - 1))`
        (Horgan et al., 2018, arXiv 1803.00933, section 4.1). Usual: 0.4.
      actor_period: iterations between two refreshes of the parameters that act. Usual: 1.
      learning_rate: step size of Adam. Usual: 6e-5 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`, if they are given; otherwise
        what was learned may be lost again. Usual: True.
      discount: the factor per step. Usual: 0.99.
      huber_delta: the error from which on the loss of a value is no longer quadratic but linear; None never is. Usual: None, or
        1 if rewards are clipped.
      target_period: updates between two moves of the target network. Usual: 1 with a small `tau`, or 100 to 10,000.
      tau: how far it moves towards the online network. Usual: 1, or 0.005 to 0.05 with a period of 1.
      adam_epsilon: what keeps Adam's division finite; larger ones damp steps along small gradients. Usual: 1e-8 to 1.5e-4.
      max_grad_norm: gradients are scaled down to this global norm. Usual: 10.
      hidden_sizes: widths of the dense layers. Usual: (64, 64), or (128,) after a convolution.
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
      network: "mlp", "cnn", or "auto", which convolves observations of three dimensions. Usual: "auto".
      data: a data set to learn from as well, by its path (`msrl_jax.data.load`); from Python, a `msrl_jax.data.Dataset` too.
        Usual: None.
      data_fraction: share of every batch that comes from it, rounded to whole rows of each of the `shards`. Usual: 0.5.
      total_steps: environment steps over which `beta` rises and the learning rate falls; both stay as they are if it is None.
    """

    num_envs: int = 16
    unroll_length: int = 4
    num_updates: int = 4
    batch_size: int = 128
    capacity: int = 20_000
    learning_starts: int | None = 1_000
    storage: str | None = None
    shards: int | None = None
    n_step: int = 1
    double: bool = True
    dueling: bool = False
    distribution: str = "none"
    num_atoms: int = 51
    v_min: float | None = None
    v_max: float | None = None
    prioritised: bool = False
    alpha: float = 0.4
    beta: float = 0.4
    exploration: str = "annealed"
    exploration_steps: int = 10_000
    final_epsilon: float = 0.05
    base_epsilon: float = 0.4
    actor_period: int = 1
    learning_rate: float = 2.5e-4
    anneal_learning_rate: bool = True
    discount: float = 0.99
    huber_delta: float | None = None
    target_period: int = 1
    tau: float = 0.02
    adam_epsilon: float = 1e-5
    max_grad_norm: float = 10.0
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    network: str = "auto"
    data: str | None = None
    data_fraction: float = 0.5
    total_steps: int | None = None

    def __post_init__(self):
        check_acting(self)
        check.check_integers(self, 2, "num_atoms")
        check.check_numbers(self, "v_min", "v_max")
        check.check_choice(self, "distribution", ("none", "c51", "qr"))
        if self.distribution == "c51":
            support(self)


def make_buffer(env: Environment, config: DQNConfig) -> Replay:
    """Makes the replay buffer, of n-step transitions.

    Args:
      env: the environment whose transitions it holds.
      config: its size and kind.

    Returns:
      The buffer.

    Raises:
      ValueError: if sizes do not fit each other, or the devices' memory, or if the observations do not fit the storage.
    """
    return replay_buffer(transition_of(env), config, "n_step is", length=config.n_step, discount=config.discount)


def build(env: Environment, config: DQNConfig) -> Agent:
    """Builds DQN for one environment.

    Args:
      env: the environment; its action space is `Discrete`.
      config: what to compute.

    Returns:
      The agent.

    Raises:
      ValueError: if the sizes of the buffer do not fit, or if the network does not.
      TypeError: if a space is not supported.
    """
    venv, action_space = envs.EpisodeStatistics(envs.vectorize(env, config.num_envs)), check_choices("DQN", env.action_space)
    buffer, mixture = make_buffer(env, split_batch(config)[0]), make_mixture(env, config)
    rule = q_learning(venv.observation_space, action_space, config, learning_rate_of(config))
    explore = epsilon_greedy(config, action_space.n, buffer.min_size)

    def act(params: Any, obs: jax.Array, keys: jax.Array, steps: jax.Array) -> jax.Array:
        return explore(rule.choose_action(params, obs, None), keys, steps)

    return off_policy_agent(
        venv, buffer, init=rule.init, act=act, update=rule.update, choose_action=rule.choose_action,
        to_env_action=lambda action: jnp.asarray(action, action_space.dtype), unroll_length=config.unroll_length,
        num_updates=config.num_updates, batch_size=config.batch_size, beta=importance_exponent(config),
        actor_period=config.actor_period, report_lost=config.storage is not None, mixture=mixture,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ApexDQNConfig(DQNConfig):
    """Ape-X DQN (Horgan et al., 2018, arXiv 1803.00933) as settings of DQN: many environments, each with its own epsilon.

    What differs from the paper: a window that is new has the largest priority so far, not one from the actor's own error; and
    actors and learner take turns at a fixed ratio, or work at once under a distribution policy with `staleness`.
    """

    num_envs: int = 64
    num_updates: int = 8
    n_step: int = 3
    double: bool = True
    dueling: bool = True
    prioritised: bool = True
    exploration: str = "per_env"
    actor_period: int = 4


# A table of the fields, as every config has: those of DQN.
_, _, _fields = inspect.cleandoc(DQNConfig.__doc__ or "").partition("Attributes:")
ApexDQNConfig.__doc__ = f"{inspect.cleandoc(ApexDQNConfig.__doc__ or '')}\n\nAttributes:{_fields}"

DQN = register(Algorithm("dqn", DQNConfig, build))
ApexDQN = register(Algorithm("apex_dqn", ApexDQNConfig, build))
