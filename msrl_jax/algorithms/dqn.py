"""Deep Q-learning (Mnih et al., 2013, arXiv 1312.5602; 2015, Nature 518), the extensions of Rainbow, and Ape-X.

This file has the network, the loss and the update; the loop is in `loops/off_policy.py`. In the shape descriptions, `B` is
`batch_size`, `A` the number of actions and `N` the number of outputs per action: one value, or the atoms or quantiles of a
distribution.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from msrl_jax import envs
from msrl_jax.algorithms.base import Agent, Algorithm, register
from msrl_jax.algorithms.configs.base import Tunable
from msrl_jax.algorithms.configs.checks import check_integers, check_numbers
from msrl_jax.algorithms.configs.network import Activation, NetworkConfig
from msrl_jax.algorithms.configs.q_learning import QLearningConfig
from msrl_jax.algorithms.configs.replay import MixingConfig
from msrl_jax.algorithms.configs.rollout import EnvGroupsConfig
from msrl_jax.algorithms.configs.spaces import check_discrete
from msrl_jax.algorithms.loops.buffers import n_step_buffer
from msrl_jax.algorithms.loops.exploration import epsilon_greedy
from msrl_jax.algorithms.loops.off_policy import off_policy_agent
from msrl_jax.algorithms.loops.optimizer import annealed_learning_rate, make_optimizer
from msrl_jax.algorithms.loops.replaying import Batch, Learner, Progress, Rule, make_apply_update, polyak_update
from msrl_jax.algorithms.losses import value_loss
from msrl_jax.algorithms.losses.q_learning import categorical_loss, categorical_projection, greedy_target, quantile_huber_loss
from msrl_jax.algorithms.networks.cores import Carry
from msrl_jax.algorithms.networks.q_network import q_network
from msrl_jax.counters import Counter, advance, remainder
from msrl_jax.envs import Environment
from msrl_jax.envs.masks import only_legal
from msrl_jax.fragments import fragment
from msrl_jax.replay import NStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class DQNConfig(NetworkConfig, MixingConfig, QLearningConfig, EnvGroupsConfig):
    """What DQN computes; a distribution policy decides where it runs.

    The defaults are for small tasks on a CPU: many environments, large batches, Adam and a target network that follows
    slowly. The papers have one environment, batches of 32, RMSProp and a target network that is copied.

    Attributes:
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
      double: whether the online network chooses the action of a target and the target network values it. Usual: True.
      distribution: "none" learns expected returns, "c51" the probabilities of returns at fixed atoms, "qr" quantiles of
        returns. Quantiles need a higher learning rate and a slower target network: for CartPole-v1, `learning_rate=5e-4` and
        `tau=0.005`. Usual: "none".
      num_atoms: number of atoms or quantiles, `N`. Usual: 51 atoms, 32 to 200 quantiles.
      v_min: the lowest atom of "c51"; None takes `-1 / (1 - discount)`, the smallest return if rewards are at least -1.
        Usual: the smallest possible return.
      v_max: the highest atom of "c51"; None takes `1 / (1 - discount)`. Usual: the largest possible return.
    """

    unroll_length: int = 4
    batch_size: int = 128
    capacity: int = 20_000
    learning_rate: Tunable = 2.5e-4
    activation: Activation = "relu"
    double: bool = True
    distribution: Literal["none", "c51", "qr"] = "none"
    num_atoms: int = 51
    v_min: Tunable | None = None
    v_max: Tunable | None = None

    def check(self) -> None:
        """Raises ValueError unless there are at least two atoms, and limits for the atoms of "c51"."""
        check_integers(self, 2, "num_atoms")
        check_numbers(self, "v_min", "v_max")
        if self.distribution != "c51":
            return
        name = type(self).__name__
        if (self.v_min is None or self.v_max is None) and self.discount == 1:
            raise ValueError(
                f"{name}.discount=1.0 bounds no return; give v_min and v_max for distribution='c51', or use discount=0.99"
            )
        v_min, v_max = self.support
        if v_min >= v_max:
            raise ValueError(f"{name}.v_min={v_min:g} is not below v_max={v_max:g}; use a smaller v_min or a larger v_max")

    @property
    def support(self) -> tuple[float, float]:
        """The lowest and the highest atom of "c51"."""
        v_min = -1 / (1 - self.discount) if self.v_min is None else self.v_min
        return v_min, 1 / (1 - self.discount) if self.v_max is None else self.v_max


def build(env: Environment, config: DQNConfig) -> Agent:
    """Builds DQN for one environment.

    Args:
      env: the environment; its action space is `Discrete`.
      config: the settings of the algorithm.

    Returns:
      The agent.

    Raises:
      ValueError: if the sizes of the buffer do not fit, or if the network does not.
      TypeError: if a space is not supported.
    """
    action_space = check_discrete("DQN", env.action_space)
    venv = envs.EpisodeStatistics(envs.vectorize(env, config.num_envs))
    buffer = n_step_buffer(env, config)
    num_outputs = 1 if config.distribution == "none" else config.num_atoms
    network = q_network(venv.observation_space, action_space, config, dueling=config.dueling, num_atoms=num_outputs)
    v_min, v_max = config.support if config.distribution == "c51" else (0.0, 0.0)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=config.adam_epsilon)
    apply_update = make_apply_update(optimizer)

    def init(key: jax.Array, obs: jax.Array) -> Learner:
        params = network.init(key, obs)
        return Learner(params, jax.tree.map(jnp.copy, params), optimizer.init(params))

    def expected(outputs: jax.Array) -> jax.Array:
        """The action values `[..., A]` of outputs `[..., A, N]`: expectations of the distributions."""
        if config.distribution == "c51":
            return jax.nn.softmax(outputs) @ jnp.linspace(v_min, v_max, config.num_atoms)
        return outputs.mean(-1)

    def loss_and_error(outputs: jax.Array, next_outputs: jax.Array, reward: jax.Array, discount: jax.Array):
        """The loss of one example, and the TD error for its priority, from its outputs `[N]` and the target network's `[N]`."""
        if config.distribution == "c51":
            masses = categorical_projection(jax.nn.softmax(next_outputs), reward, discount, v_min, v_max)
            loss = categorical_loss(outputs, masses)
            return loss, loss
        target = reward + discount * next_outputs
        error = target.mean() - outputs.mean()
        if config.distribution == "qr":
            return quantile_huber_loss(outputs, target), error
        if config.huber_delta is None:
            return value_loss(outputs.mean(), target.mean()), error
        return optax.huber_loss(outputs.mean(), target.mean(), delta=config.huber_delta), error

    @fragment(role="learner")
    def gradients(params, target_params, experience: NStep, weight):
        next_target = network.apply(target_params, experience.next_obs)
        next_online = network.apply(params, experience.next_obs) if config.double else next_target
        next_outputs = jax.vmap(greedy_target)(only_legal(expected(next_online), experience.next_obs), next_target)

        def loss(params):
            outputs = network.apply(params, experience.obs)
            taken = jnp.take_along_axis(outputs, experience.action[:, None, None], 1)[:, 0]
            losses, td_error = jax.vmap(loss_and_error)(taken, next_outputs, experience.reward, experience.discount)
            return (weight * losses).mean(), (td_error, {"value": expected(taken).mean(), "loss": losses.mean()})

        return jax.grad(loss, has_aux=True)(params)

    def update(learner: Learner, batch: Batch, progress: Progress) -> tuple[Learner, jax.Array, Mapping[str, jax.Array]]:
        grads, (td_error, stats) = gradients(learner.params, learner.target_params, batch.experience, batch.weight)
        rate = annealed_learning_rate(config, progress.iteration, config.steps_per_iteration)
        params, opt_state = apply_update(learner.params, learner.opt_state, grads, rate, progress.ready)
        moves = progress.ready & (remainder(advance(progress.update), config.target_period) == 0)
        target_params = polyak_update(learner.target_params, params, jnp.where(moves, config.tau, 0.0))
        return Learner(params, target_params, opt_state), td_error, stats

    def choose_action(params: Any, obs: jax.Array, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
        return only_legal(expected(network.apply(params, obs)), obs).argmax(-1).astype(jnp.int32), carry

    randomly = epsilon_greedy(config, num_envs=config.num_envs, num_actions=action_space.n, random_steps=buffer.min_size)

    def explore(params: Any, obs: jax.Array, keys: jax.Array, steps: Counter, carry: Carry) -> tuple[jax.Array, Carry]:
        greedy, carry = choose_action(params, obs, None, carry)
        return randomly(greedy, keys, steps, obs), carry

    return off_policy_agent(
        venv,
        buffer,
        Rule(init, update, choose_action),
        explore,
        unroll_length=config.unroll_length,
        num_updates=config.num_updates,
        refresh_period=config.actor_period,
        env_groups=config.env_groups,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApexDQNConfig(DQNConfig):
    """Ape-X DQN (Horgan et al., 2018, arXiv 1803.00933) as settings of DQN: many environments, each with its own epsilon.

    There are two differences from the paper. A new window has the largest priority so far; in the paper, the actor computes an
    initial priority. Actors and learner take turns at a fixed ratio, or run at the same time under a policy with `staleness`.
    """

    num_envs: int = 64
    num_updates: int = 8
    n_step: int = 3
    double: bool = True
    dueling: bool = True
    prioritised: bool = True
    exploration: Literal["annealed", "per_env"] = "per_env"
    actor_period: int = 4


DQN = register(Algorithm("dqn", DQNConfig, build))
ApexDQN = register(Algorithm("apex_dqn", ApexDQNConfig, build))
