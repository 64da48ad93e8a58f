"""Deep Q-learning (Mnih et al., 2013, arXiv 1312.5602; 2015, Nature 518), the extensions of Rainbow, and Ape-X.

Later ones are implicit quantiles (Dabney et al., 2018, arXiv 1806.06923) and M-DQN (Vieillard et al., 2020, arXiv 2007.14430).
This file has the loss; the loop and the update are in `loops/off_policy.py`. In the shape descriptions, `B` is `batch_size`,
`A` the number of actions and `N` the number of outputs per action: one value, or the atoms or quantiles of a distribution.
"""

from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax import envs
from msrl_jax.algorithms.agent import Agent
from msrl_jax.algorithms.config import (
    Activation,
    NetworkKind,
    OptimizerKind,
    Tunable,
    config,
    field,
    tunable,
    variant,
)
from msrl_jax.algorithms.loops.buffers import check_data, check_discrete, n_step_buffer
from msrl_jax.algorithms.loops.off_policy import Batch, epsilon_greedy, gradient_rule, off_policy_agent
from msrl_jax.algorithms.losses.distributional import (
    categorical_loss,
    categorical_projection,
    check_support,
    quantile_huber_loss,
    value_error,
)
from msrl_jax.algorithms.networks.layers import Carry, make_torso
from msrl_jax.algorithms.networks.q_network import greedy_target, q_network
from msrl_jax.algorithms.optimizers import make_optimizer
from msrl_jax.algorithms.options import (
    C51,
    IQN,
    QR,
    Annealed,
    Double,
    Expected,
    Greedy,
    Hindsight,
    Munchausen,
    PerEnv,
    Prioritized,
    Replay,
)
from msrl_jax.envs import Environment
from msrl_jax.envs.masks import only_legal
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import Counter
from msrl_jax.replay import NStep


@config("dqn")
class DQN:
    """Deep Q-learning, with the extensions of Rainbow; for discrete actions.

    The defaults are for small tasks on a CPU: many environments, large batches, Adam and a target network that follows
    slowly. The papers have one environment, batches of 32, RMSProp and a target network that is copied.
    """

    num_envs: int = field(default=16, doc="environments stepped in parallel, `E`. Usual: 1 to 256.")
    unroll_length: int = field(default=4, doc="steps of every environment per iteration, `T`. Usual: 1 to 40.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    num_updates: int = field(default=4, doc="updates per iteration, `K`. Usual: 1/8 to 1 per environment step.")
    batch_size: int = field(default=128, doc="transitions per update, `B`. Usual: 32 to 512.")
    replay: Replay = field(default=Replay(), doc="the buffer. Usual: 1e4 to 1e6 steps.")
    hindsight: Hindsight | None = field(default=None, doc="goals of sampled steps that were achieved later. Usual: None.")
    learning_rate: Tunable = tunable(default=0.00025, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: Tunable = tunable(default=10.0, above=0, doc="gradients are clipped to this global norm. Usual: 10 to 40.")
    exploration: Annealed | PerEnv = field(default=Annealed(), doc="how random actions are. Usual: annealed.")
    actor_period: int = field(default=1, low=1, high=2**24, doc="iterations between two copies to the actors. Usual: 1.")
    tau: Tunable = tunable(default=0.02, above=0, high=1, doc="how far the target moves; 1 copies. Usual: 1, or 0.005 to 0.05.")
    target_period: int = field(default=1, low=1, high=2**24, doc="updates per move of the target. Usual: 1, or 100 to 10,000.")
    dueling: bool = field(default=False, doc="whether values and advantages have streams of their own. Usual: True for images.")
    adam_epsilon: Tunable = tunable(default=1e-05, above=0, doc="small number in Adam's denominator. Usual: 1e-8 to 1e-3.")
    data: str | None = field(default=None, doc="path of a data set to mix in, or a `msrl_jax.data.Dataset`. Usual: None.")
    data_fraction: float = field(default=0.5, above=0, high=1, doc="share of `data` in a batch, rounded per shard. Usual: 0.5.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (64, 64); (128,) for images.")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    target: Double | Greedy | Munchausen = field(default=Double(), doc="which values targets take. Usual: double.")
    returns: Expected | C51 | QR | IQN = field(
        default=Expected(), doc="what the network predicts of a return. Usual: expected."
    )

    def check(self) -> None:
        """Raises ValueError unless the data are some, atoms have limits, and M-DQN has single steps and no atoms."""
        check_data(self)
        check_support(self)
        name = type(self).__name__
        if isinstance(self.target, Munchausen) and self.replay.n_step > 1:
            raise ValueError(
                f"{name}.target={self.target} adds the log-policy of every step to its reward, but of replay.n_step="
                f"{self.replay.n_step} steps the buffer keeps the sum of their rewards; use replay.n_step=1"
            )
        if isinstance(self.target, Munchausen) and isinstance(self.returns, C51):
            raise ValueError(
                f"{name}.target={self.target} averages what actions return, but returns='c51' has probabilities; use "
                "returns='expected', 'qr' or 'iqn'"
            )

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space, a size or the data do not fit."""
        action_space = check_discrete("DQN", env.action_space)
        venv = envs.EpisodeStatistics(envs.vectorize(env, self.num_envs))
        buffer = n_step_buffer(env, self)
        returns, soft = self.returns, self.target if isinstance(self.target, Munchausen) else None
        implicit = returns if isinstance(returns, IQN) else None
        num_outputs = returns.num_atoms if isinstance(returns, C51) else returns.num_quantiles if isinstance(returns, QR) else 1
        torso = make_torso(venv.observation_space, self)
        network = q_network(torso, action_space, dueling=self.dueling, num_atoms=num_outputs, implicit=implicit is not None)
        num_midpoints = implicit.num_choice_fractions if implicit else 0
        midpoints = ((jnp.arange(num_midpoints) + 0.5) / num_midpoints,) if implicit else ()
        v_min, v_max = returns.support(self.discount) if isinstance(returns, C51) else (0.0, 0.0)
        optimizer = make_optimizer(self, epsilon=self.adam_epsilon)

        def expected(outputs: jax.Array) -> jax.Array:
            """The action values `[..., A]` of outputs `[..., A, N]`: expectations of the distributions."""
            if isinstance(returns, C51):
                return jax.nn.softmax(outputs) @ jnp.linspace(v_min, v_max, returns.num_atoms, dtype=jnp.float32)
            return outputs.mean(-1)

        def action_values(params: Any, obs: Any) -> jax.Array:
            """The values `[B, A]`, -inf of illegal actions, by which actions are chosen."""
            return only_legal(expected(network.apply(params, obs, *midpoints)), obs)

        def loss_and_error(
            outputs: jax.Array, next_outputs: jax.Array, reward: jax.Array, discount: jax.Array, *fraction: jax.Array
        ):
            """The loss of one example, and the TD error for its priority, from its outputs `[N]` and the target's `[N']`."""
            if isinstance(returns, C51):
                atoms = jnp.linspace(v_min, v_max, returns.num_atoms, dtype=jnp.float32)
                masses = categorical_projection(jax.nn.softmax(next_outputs), reward + discount * atoms, v_min, v_max)
                loss = categorical_loss(outputs, masses)
                return loss, loss
            target = reward + discount * next_outputs
            error = target.mean() - outputs.mean()
            if isinstance(returns, QR | IQN):
                return quantile_huber_loss(outputs, target, 1.0, *fraction), error
            return value_error(outputs.mean(), target.mean(), returns.huber_delta), error

        def random_fractions(key: jax.Array, returns: IQN) -> tuple[tuple[jax.Array], tuple[jax.Array]]:
            keys, sizes = jax.random.split(key), (returns.num_fractions, returns.num_target_fractions)
            one, other = (jax.random.uniform(k, (self.batch_size, n), jnp.float32) for k, n in zip(keys, sizes, strict=True))
            return (one,), (other,)

        @fragment(role="learner")
        def gradients(params, target_params, batch: Batch):
            experience: NStep = batch.experience
            fraction, next_fraction = random_fractions(batch.key, implicit) if implicit else ((), ())
            next_target = network.apply(target_params, experience.next_obs, *next_fraction)
            if implicit or not isinstance(self.target, Greedy):
                chooser = params if isinstance(self.target, Double) else target_params
                next_value = action_values(chooser, experience.next_obs)
            else:
                next_value = only_legal(expected(next_target), experience.next_obs)
            reward = experience.reward
            if soft:
                next_outputs = jax.vmap(soft_target, (0, 0, None))(next_value, next_target, soft.temperature)
                value = action_values(target_params, experience.obs)
                reward += jax.vmap(munchausen_reward, (0, 0, None, None, None))(
                    value, experience.action, soft.scale, soft.temperature, soft.clip
                )
            else:
                next_outputs = jax.vmap(greedy_target)(next_value, next_target)

            def loss(params):
                outputs = network.apply(params, experience.obs, *fraction)
                taken = jnp.take_along_axis(outputs, experience.action[:, None, None], 1)[:, 0]
                losses, td_error = jax.vmap(loss_and_error)(taken, next_outputs, reward, experience.discount, *fraction)
                return (batch.weight * losses).mean(), (td_error, {"value": expected(taken).mean(), "loss": losses.mean()})

            return jax.grad(loss, has_aux=True)(params)

        def choose_action(params: Any, obs: jax.Array, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
            return action_values(params, obs).argmax(-1).astype(jnp.int32), carry

        randomly = epsilon_greedy(
            self.exploration, num_envs=self.num_envs, num_actions=action_space.n, random_steps=buffer.min_size
        )

        def explore(params: Any, obs: jax.Array, keys: jax.Array, steps: Counter, carry: Carry) -> tuple[jax.Array, Carry]:
            greedy, carry = choose_action(params, obs, None, carry)
            return randomly(greedy, keys, steps, obs), carry

        init = lambda key, obs: network.init(key, obs, *midpoints)  # noqa: E731
        rule = gradient_rule(self, optimizer, init, gradients, choose_action)
        return off_policy_agent(self, venv, buffer, rule, explore)


def soft_target(next_value: jax.Array, next_target: jax.Array, temperature: float) -> jax.Array:
    """What a softmax policy of values `[A]` returns `[N]`: outputs `[A, N]` and entropy (arXiv 2007.14430, eq. 1)."""
    log_policy = jax.nn.log_softmax(next_value / temperature)[:, None]
    policy = jnp.exp(log_policy)
    return jnp.where(policy > 0, policy * (next_target - temperature * log_policy), 0.0).sum(0)


def munchausen_reward(value: jax.Array, action: jax.Array, scale: float, temperature: float, clip: float) -> jax.Array:
    """The log-probability of an action under a softmax policy of values `[A]`, scaled and clipped (arXiv 2007.14430)."""
    log_prob = temperature * jax.nn.log_softmax(value / temperature)[action]
    return scale * jnp.clip(log_prob, clip, 0.0)


ApexDQN = variant(
    DQN,
    "ApexDQN",
    "apex_dqn",
    """Ape-X DQN (Horgan et al., 2018, arXiv 1803.00933): DQN with many environments, each with its own epsilon.

    There are two differences from the paper. A new window has the largest priority so far; in the paper, the actor computes an
    initial priority. Actors and learner take turns at a fixed ratio, or run at the same time under a policy with `staleness`.
    """,
    num_envs=64,
    num_updates=8,
    replay=Replay(n_step=3, priorities=Prioritized()),
    dueling=True,
    exploration=PerEnv(),
    actor_period=4,
)
