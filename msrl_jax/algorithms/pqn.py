"""PQN (Gallici et al., 2024, arXiv 2407.04811): Q-learning in parallel environments, without a buffer or a target network.

Layer normalization keeps the values from diverging. In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs` and
`A` the number of actions. A minibatch holds some time steps of all environments. With a recurrent core, it holds whole unrolls
of some environments, and gradients flow back to the first step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.action_spaces import check_discrete
from msrl_jax.agents.agent import (
    Agent,
    Metrics,
    Progress,
    learning_rate_at,
    learning_rate_metric,
    logical_axes,
    split_keys,
    steps_before,
)
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.agents.vector_env import make_vector_env
from msrl_jax.configs.config import Activation, NetworkKind, OptimizerKind, Tunable, TunableOrNone, config, field, tunable
from msrl_jax.configs.exploration import Annealed, Exploration
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.masks import only_legal
from msrl_jax.fragments import fragment
from msrl_jax.kernels.networks import global_norm
from msrl_jax.kernels.time import truncated_values
from msrl_jax.loops.minibatches import check_minibatches, gather_carry, gather_minibatch, has_core, shuffle
from msrl_jax.loops.trajectory import next_values
from msrl_jax.networks.core import CoreKind
from msrl_jax.networks.q_network import epsilon_greedy, exploration_rate, value_heads
from msrl_jax.networks.recurrent import recurrent_network
from msrl_jax.networks.unrolls import Carry, first_steps, reset_carry
from msrl_jax.returns.advantages import gae
from msrl_jax.returns.means import mean


class PQNState(NamedTuple):
    """The state of a run."""

    params: Any
    opt_state: optax.OptState
    key: jax.Array  # of the learner, for shuffling, []
    actor_keys: jax.Array  # keys for exploration, one per environment, [E]
    env_state: Any
    obs: jax.Array  # for the next actions, [E, ...]
    carry: Carry = ()  # the recurrent state of the actors, [E, ...] each


class QTrajectory(NamedTuple):
    """The steps of an unroll; every leaf is `[T, E, ...]`."""

    obs: jax.Array  # before every action
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array  # whether the episode ended in a terminal state
    truncated: jax.Array  # whether the episode was cut short
    valid: jax.Array | None  # which steps count; all if None

    @property
    def is_first(self) -> jax.Array:
        """Where to clear the carry: at first steps of episodes, except at the start of the unroll (already cleared). bool"""
        return first_steps(self.terminated | self.truncated)


@config("pqn", actions=("discrete",))
class PQN:
    """Parallelised Q-network; for discrete actions.

    The optimizer is Adam, in the paper it is RAdam. `layer_norm` is on by default, in no other algorithm.
    """

    num_envs: int = field(default=32, doc="environments stepped in parallel, `E`. Usual: 32 to 4096.")
    unroll_length: int = field(default=64, doc="steps of every environment per iteration, `T`. Usual: 16 to 128.")
    num_epochs: int = field(default=4, doc="passes over the batch per iteration. Usual: 1 to 4.")
    num_minibatches: int = field(default=16, doc="updates per pass, a divisor of `T`, or with a core of `E`. Usual: 4 to 32.")
    learning_rate: Tunable = tunable(default=5e-4, above=0, doc="step size of updates. Usual: 1e-4 to 5e-4.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    adam_epsilon: Tunable = tunable(default=1e-05, above=0, doc="small number in Adam's denominator. Usual: 1e-8 to 1e-5.")
    max_grad_norm: TunableOrNone = tunable(default=10.0, above=0, doc="gradients are clipped to this global norm. Usual: 10.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    q_lambda: Tunable = tunable(default=0.95, low=0, high=1, doc="lambda of returns: 0 bias, 1 variance. Usual: 0.65 to 0.95.")
    exploration: Exploration = field(default=Annealed(100_000, 0.02), doc="rate of random actions. Usual: annealed.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (128, 128); (512,) for images.")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=True, doc="whether hidden dense layers are normalized (LayerNorm). Usual: True.")
    core: CoreKind | Any | None = field(default=None, doc='recurrent layer; "min_gru" is fastest. Usual: None, "gru".')
    normalize_observations: bool = field(default=False, doc="standardize by running statistics. Usual: False.")
    normalize_rewards: bool = field(default=False, doc="divide by the return's running deviation. Usual: False.")

    def check(self) -> None:
        """Raises ValueError unless `num_minibatches` divides `unroll_length` (with a recurrent core, `num_envs`)."""
        check_minibatches(self)

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        action_space = check_discrete(type(self).__name__, env.action_space)
        to_env_action = action_transform(action_space)
        venv = make_vector_env(env, self)
        heads = lambda torso: value_heads(torso, action_space, self, dueling=False)
        network = recurrent_network(venv.observation_space, heads, self)
        optimizer = make_optimizer(self, epsilon=self.adam_epsilon)

        def init(key: jax.Array) -> PQNState:
            params_key, env_key, actor_key, learner_key = jax.random.split(key, 4)
            env_state, obs = venv.reset(env_key)
            params, carry = network.init(params_key), network.initial_carry((self.num_envs,))
            actor_keys = jax.random.split(actor_key, self.num_envs)
            return PQNState(params, optimizer.init(params), learner_key, actor_keys, env_state, obs, carry)

        axes = logical_axes(
            PQNState, params=P(), opt_state=P(), key=P(), actor_keys=P("env"), env_state=venv.axes, obs=P("env"), carry=P("env")
        )

        def values(params: Any, obs: Any, carry: Carry) -> tuple[jax.Array, Carry]:
            """Returns action values `[N, A]` in observations `[N, ...]`, -inf for illegal actions; and the new carries."""
            outputs, carry = network.step(params, obs, carry)
            return only_legal(outputs, obs), carry

        @fragment(role="actor")
        def explore(params, obs, keys, steps, is_first, carry):
            q, carry = values(params, obs, reset_carry(is_first, carry))
            greedy = q.argmax(-1).astype(jnp.int32)
            epsilon = exploration_rate(self.exploration, steps, self.num_envs)
            return epsilon_greedy(epsilon, greedy, keys, obs, action_space.n), carry

        @fragment(role="env")
        def env_step(env_state, action):
            return venv.step(env_state, to_env_action(action))

        @fragment(role="env")
        def pop_episodes(env_state):
            return venv.pop_episodes(env_state)

        # The actors compute the values of the last observations, so that the learner does not receive these observations.
        @fragment(role="actor")
        def bootstrap(params, final_obs, carries, truncated):
            largest = lambda params, final: values(params, *final)[0].max(-1)
            return truncated_values(largest, params, (final_obs, carries), truncated, and_last=True)

        @fragment(role="learner")
        def lambda_targets(params, t, bootstrap_value, carry):
            """Returns the Q(lambda) targets of the greedy policy: `lambda_return` for valid (`valid`) steps. `[T, E]`"""
            value = only_legal(network.unroll(params, t.obs, t.is_first, carry)[0], t.obs).max(-1)
            next_value = next_values(value, bootstrap_value[-1], bootstrap_value, t.truncated)
            return value + gae(
                t.reward,
                value,
                next_value,
                t.terminated,
                t.truncated,
                t.valid,
                discount=self.discount,
                gae_lambda=self.q_lambda,
            )

        @fragment(role="learner")
        def gradients(params, batch, carry, index):
            minibatch, target = gather_minibatch(self, batch, index)
            carry = gather_carry(self, carry, index)

            def loss(params):
                outputs, _ = network.unroll(params, minibatch.obs, minibatch.is_first, carry)
                action_value = jnp.take_along_axis(outputs, minibatch.action[..., None], -1)[..., 0]
                total = mean(optax.l2_loss(action_value, target), minibatch.valid)
                return total, {"loss": total, "value": mean(action_value, minibatch.valid)}

            return jax.grad(loss, has_aux=True)(params)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate):
            updates, opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
            return optax.apply_updates(params, updates), opt_state, global_norm(grads)

        @fragment(role="learner")
        def learn(params, opt_state, progress, key, t, bootstrap_value, carry):
            batch = t, lambda_targets(params, t, bootstrap_value, carry)
            learning_rate = learning_rate_at(self, progress)
            key, minibatches = shuffle(key, self)

            def update(learner, index):
                grads, metrics = gradients(learner[0], batch, carry, index)
                *learner, grad_norm = apply_update(*learner, grads, learning_rate)
                return tuple(learner), metrics | {"grad_norm": grad_norm}

            (params, opt_state), metrics = jax.lax.scan(update, (params, opt_state), minibatches)
            return params, opt_state, key, jax.tree.map(jnp.mean, metrics) | learning_rate_metric(learning_rate)

        def iteration(state: PQNState, progress: Progress) -> tuple[PQNState, Metrics]:
            def step(loop_state, inputs):
                keys, steps = inputs
                env_state, obs, is_first, carry = loop_state
                action, carry = explore(state.params, obs, keys, steps, is_first, carry)
                env_state, t = env_step(env_state, action)
                experience = QTrajectory(obs, action, t.reward, t.terminated, t.truncated, t.valid)
                return (env_state, t.obs, t.terminated | t.truncated, carry), (experience, t.final_obs, carry)

            actor_keys, keys = split_keys(state.actor_keys, self.unroll_length)
            start = state.env_state, state.obs, jnp.zeros(self.num_envs, bool), state.carry
            inputs = keys, steps_before(self, progress)
            (env_state, obs, is_first, carry), (experience, final_obs, carries) = jax.lax.scan(step, start, inputs)
            bootstrap_value = bootstrap(state.params, final_obs, carries, experience.truncated)
            env_state, episodes = pop_episodes(env_state)
            params, opt_state, key, metrics = learn(
                state.params, state.opt_state, progress, state.key, experience, bootstrap_value, state.carry
            )
            new_state = PQNState(params, opt_state, key, actor_keys, env_state, obs, reset_carry(is_first, carry))
            return new_state, {**metrics, **episodes}

        def act(state: PQNState, obs: jax.Array, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
            q, carry = values(state.params, obs, carry)
            return to_env_action(q.argmax(-1)), carry

        return Agent(
            init=init,
            iteration=iteration,
            act=act,
            axes=axes,
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=self.num_epochs * self.num_minibatches,
            env=venv,
            initial_carry=lambda num_envs: network.initial_carry((num_envs,)),
            env_group=self.num_minibatches if has_core(self) else 1,
        )
