"""Deep Q-learning (Mnih et al., 2013, arXiv 1312.5602; 2015, Nature 518), the extensions of Rainbow, and Ape-X.

Later ones are implicit quantiles (Dabney et al., 2018, arXiv 1806.06923) and M-DQN (Vieillard et al., 2020, arXiv 2007.14430).
This file has the loss; the loop and the update are in `loops/off_policy.py`. In the shape descriptions, `B` is `batch_size`,
`A` the number of actions and `N` the number of outputs per action: one value, or the atoms or quantiles of a distribution.
"""

from collections.abc import Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from msrl_jax import envs
from msrl_jax.algorithms.agent import Agent
from msrl_jax.algorithms.config import (
    Activation,
    Codec,
    NetworkKind,
    OptimizerKind,
    Tunable,
    TunableOrNone,
    config,
    field,
    tunable,
    variant,
)
from msrl_jax.algorithms.loops.buffers import check_data, check_discrete, n_step_buffer
from msrl_jax.algorithms.loops.off_policy import Batch, Exploration, epsilon_greedy, gradient_rule, off_policy_agent
from msrl_jax.algorithms.losses.distributional import (
    categorical_loss,
    categorical_projection,
    check_support,
    quantile_huber_loss,
    support,
)
from msrl_jax.algorithms.networks.layers import Carry, make_torso
from msrl_jax.algorithms.networks.q_network import greedy_target, q_network
from msrl_jax.algorithms.optimizers import make_optimizer
from msrl_jax.envs import Environment
from msrl_jax.envs.masks import only_legal
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import Counter
from msrl_jax.replay import NStep
from msrl_jax.replay.relabelling import Strategy


@config(
    "dqn",
    needs={
        "exploration=annealed": "exploration_steps final_epsilon",
        "exploration=per_env": "base_epsilon",
        "distribution=c51": "v_min v_max",
        "distribution=c51|qr": "num_atoms",
        "prioritised=True": "alpha beta",
        "distribution=iqn": "num_fractions num_target_fractions num_choice_fractions",
        "relabel!=0|0.0": "relabel_by",
        "munchausen=True": "munchausen_scale munchausen_temperature munchausen_clip",
    },
)
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
    storage: Codec | None = field(default=None, doc='codec of observations ("scaled_uint8": over 255). Usual: None, "uint8".')
    shards: int | None = field(default=None, doc="parts of the buffer; None: gcd of `batch_size`, `num_envs`, 8. Usual: None.")
    capacity: int = field(default=20000, doc="environment steps that the buffer holds. Usual: 1e4 to 1e6.")
    learning_starts: int | None = field(default=1000, doc="steps at random first; None: what a batch needs. Usual: 1e3 to 5e4.")
    n_step: int = field(default=1, doc="rewards that a target sums up before it bootstraps. Usual: 1 to 5.")
    relabel: float = field(default=0.0, low=0, high=1, doc="share of sampled steps given achieved goals (HER). Usual: 0.8.")
    relabel_by: Strategy = field(default="future", doc='"future", "final", "episode" or "geometric" goal. Usual: "future".')
    learning_rate: Tunable = tunable(default=0.00025, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: Tunable = tunable(default=10.0, above=0, doc="gradients are clipped to this global norm. Usual: 10 to 40.")
    prioritised: bool = field(default=False, doc="whether larger TD errors are drawn more often. Usual: True for images.")
    alpha: Tunable = tunable(default=0.4, low=0, doc="exponent of priorities; 0 draws uniformly. Usual: 0.4 to 0.9.")
    beta: TunableOrNone = tunable(
        default=0.4, low=0, high=1, doc="exponent of importance weights, rising to 1; None: all are 1. Usual: 0.4 to 0.6."
    )
    exploration: Exploration = field(default="annealed", doc='epsilon falls, or is constant "per_env". Usual: "annealed".')
    exploration_steps: int = field(default=10000, doc='"annealed": steps until epsilon is final. Usual: a tenth of the run.')
    final_epsilon: Tunable = tunable(default=0.05, low=0, high=1, doc="epsilon after `exploration_steps`. Usual: 0.01 to 0.1.")
    base_epsilon: Tunable = tunable(
        default=0.4, low=0, high=1, doc='"per_env": `base_epsilon ** (1 + 7i/(E - 1))`. Usual: 0.4.'
    )
    actor_period: int = field(default=1, low=1, high=2**24, doc="iterations between two copies to the actors. Usual: 1.")
    tau: Tunable = tunable(default=0.02, above=0, high=1, doc="how far the target moves; 1 copies. Usual: 1, or 0.005 to 0.05.")
    target_period: int = field(default=1, low=1, high=2**24, doc="updates per move of the target. Usual: 1, or 100 to 10,000.")
    dueling: bool = field(default=False, doc="whether values and advantages have streams of their own. Usual: True for images.")
    huber_delta: TunableOrNone = tunable(
        default=None, above=0, doc="errors above it count linearly (Huber). Usual: None, or 1."
    )
    adam_epsilon: Tunable = tunable(default=1e-05, above=0, doc="small number in Adam's denominator. Usual: 1e-8 to 1e-3.")
    data: str | None = field(default=None, doc="path of a data set to mix in, or a `msrl_jax.data.Dataset`. Usual: None.")
    data_fraction: float = field(default=0.5, above=0, high=1, doc="share of `data` in a batch, rounded per shard. Usual: 0.5.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (64, 64); (128,) for images.")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    double: bool = field(default=True, doc="whether the online network chooses the action of a target. Usual: True.")
    distribution: Literal["none", "c51", "qr", "iqn"] = field(
        default="none",
        doc='"none": expected returns; "c51": probabilities of atoms; "qr": quantiles, which need a higher learning rate and '
        'a slower target (for CartPole-v1, `learning_rate=5e-4` and `tau=0.005`); "iqn": quantiles at random fractions. '
        'Usual: "none".',
    )
    num_atoms: int = field(default=51, low=2, doc="number of atoms or quantiles, `N`. Usual: 51 atoms, 32 to 200 quantiles.")
    v_min: TunableOrNone = tunable(default=None, doc='lowest atom of "c51"; None: `-1 / (1 - discount)`. Usual: lowest return.')
    v_max: TunableOrNone = tunable(
        default=None, doc='highest atom of "c51"; None: `1 / (1 - discount)`. Usual: highest return.'
    )
    num_fractions: int = field(default=8, doc='"iqn": random fractions of an example, `N` in the paper. Usual: 8 to 64.')
    num_target_fractions: int = field(default=8, doc='"iqn": random fractions of its target, `N\'`. Usual: 8 to 64.')
    num_choice_fractions: int = field(default=32, doc='"iqn": midpoints whose mean is the value that chooses, `K`. Usual: 32.')
    munchausen: bool = field(default=False, doc="whether log-policies are rewards (M-DQN, with soft targets). Usual: False.")
    munchausen_scale: Tunable = tunable(default=0.9, low=0, high=1, doc="M-DQN: weight of these rewards. Usual: 0.9.")
    munchausen_temperature: Tunable = tunable(
        default=0.03, above=0, doc="M-DQN: of the policy, in units of values. Usual: 0.03."
    )
    munchausen_clip: Tunable = tunable(default=-1.0, high=0, doc="M-DQN: smallest log-policy times temperature. Usual: -1.")

    def check(self) -> None:
        """Raises ValueError unless the data are some, atoms have limits, and M-DQN has single steps and no atoms."""
        check_data(self)
        name = type(self).__name__
        if self.munchausen and self.n_step > 1:
            raise ValueError(
                f"{name}.munchausen=True adds the log-policy of every step to its reward, but of n_step={self.n_step} steps "
                "the buffer keeps the sum of their rewards; use n_step=1"
            )
        if self.munchausen and self.distribution == "c51":
            raise ValueError(
                f"{name}.munchausen=True averages what actions return, but distribution='c51' has probabilities; use "
                "distribution='none', 'qr' or 'iqn'"
            )
        check_support(self)

    def check_given(self, given: Collection[str]) -> None:
        """Raises ValueError if the share of no data was given, or an action to choose where targets average over them."""
        check_data(self, given)
        if self.munchausen and self.double and "double" in given:
            raise ValueError(
                f"{type(self).__name__}.double=True chooses the action of a target, but with munchausen=True a target averages "
                "over all actions, with the target network's policy; leave double out"
            )

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space, a size or the data do not fit."""
        action_space = check_discrete("DQN", env.action_space)
        venv = envs.EpisodeStatistics(envs.vectorize(env, self.num_envs))
        buffer = n_step_buffer(env, self)
        num_outputs = self.num_atoms if self.distribution in ("c51", "qr") else 1
        torso, implicit = make_torso(venv.observation_space, self), self.distribution == "iqn"
        network = q_network(torso, action_space, dueling=self.dueling, num_atoms=num_outputs, implicit=implicit)
        midpoints = ((jnp.arange(self.num_choice_fractions) + 0.5) / self.num_choice_fractions,) if implicit else ()
        v_min, v_max = support(self) if self.distribution == "c51" else (0.0, 0.0)
        optimizer = make_optimizer(self, epsilon=self.adam_epsilon)

        def expected(outputs: jax.Array) -> jax.Array:
            """The action values `[..., A]` of outputs `[..., A, N]`: expectations of the distributions."""
            if self.distribution == "c51":
                return jax.nn.softmax(outputs) @ jnp.linspace(v_min, v_max, self.num_atoms, dtype=jnp.float32)
            return outputs.mean(-1)

        def action_values(params: Any, obs: Any) -> jax.Array:
            """The values `[B, A]`, -inf of illegal actions, by which actions are chosen."""
            return only_legal(expected(network.apply(params, obs, *midpoints)), obs)

        def loss_and_error(
            outputs: jax.Array, next_outputs: jax.Array, reward: jax.Array, discount: jax.Array, *fraction: jax.Array
        ):
            """The loss of one example, and the TD error for its priority, from its outputs `[N]` and the target's `[N']`."""
            if self.distribution == "c51":
                probability, atoms = jax.nn.softmax(next_outputs), jnp.linspace(v_min, v_max, self.num_atoms, dtype=jnp.float32)
                masses = categorical_projection(probability, reward + discount * atoms, v_min, v_max)
                loss = categorical_loss(outputs, masses)
                return loss, loss
            target = reward + discount * next_outputs
            error = target.mean() - outputs.mean()
            if self.distribution in ("qr", "iqn"):
                return quantile_huber_loss(outputs, target, 1.0, *fraction), error
            if self.huber_delta is None:
                return optax.l2_loss(outputs.mean(), target.mean()), error
            return optax.huber_loss(outputs.mean(), target.mean(), delta=self.huber_delta), error

        def random_fractions(key: jax.Array) -> tuple[tuple[jax.Array], tuple[jax.Array]]:
            keys, sizes = jax.random.split(key), (self.num_fractions, self.num_target_fractions)
            one, other = (jax.random.uniform(k, (self.batch_size, n), jnp.float32) for k, n in zip(keys, sizes, strict=True))
            return (one,), (other,)

        @fragment(role="learner")
        def gradients(params, target_params, batch: Batch):
            experience: NStep = batch.experience
            fraction, next_fraction = random_fractions(batch.key) if implicit else ((), ())
            next_target = network.apply(target_params, experience.next_obs, *next_fraction)
            if self.munchausen or implicit or self.double:
                chooser = target_params if self.munchausen or not self.double else params
                next_value = action_values(chooser, experience.next_obs)
            else:
                next_value = only_legal(expected(next_target), experience.next_obs)
            reward = experience.reward
            if self.munchausen:
                next_outputs = jax.vmap(soft_target, (0, 0, None))(next_value, next_target, self.munchausen_temperature)
                value = action_values(target_params, experience.obs)
                reward += jax.vmap(munchausen_reward, (0, 0, None, None, None))(
                    value, experience.action, self.munchausen_scale, self.munchausen_temperature, self.munchausen_clip
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

        randomly = epsilon_greedy(self, num_envs=self.num_envs, num_actions=action_space.n, random_steps=buffer.min_size)

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
    n_step=3,
    double=True,
    dueling=True,
    prioritised=True,
    exploration="per_env",
    actor_period=4,
)
