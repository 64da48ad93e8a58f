"""OpenAI's evolution strategies (Salimans et al., 2017, arXiv 1703.03864): a search without gradients of the policy.

Every member of a population acts with its own parameters for one episode. The update moves the parameters further towards
members with higher returns. In the shape descriptions, `E` is `num_envs`, the size of the population (member `i` acts in
environment `i`), and `D` is the number of parameters. Members `2j` and `2j + 1` add and subtract the same noise, drawn from
one seed. Every fragment that needs the noise draws it again from the seed, so actors and the learner exchange only seeds,
returns and one copy of the parameters.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, learning_rate_metric, logical_axes
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.agents.vector_env import vectorize_with_statistics
from msrl_jax.configs.config import ALL_ACTIONS, Activation, NetworkKind, OptimizerKind, Tunable, config, field, tunable
from msrl_jax.envs import Environment, NormalizeObservation
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.base import env_name, is_on_host
from msrl_jax.fragments import fragment
from msrl_jax.kernels.networks import global_norm
from msrl_jax.networks.policy_and_value import policy_and_value
from msrl_jax.networks.torso import make_torso


class ESState(NamedTuple):
    """The state of a run."""

    params: Any  # the center of the population: a tree of `D` numbers
    opt_state: optax.OptState
    actor_keys: jax.Array  # one per member; the keys of even members give the seeds of the noise, [E]
    env_key: jax.Array  # for the next reset of the environments
    env_state: Any
    obs: jax.Array  # after the last step, [E, ...]
    midway: jax.Array  # whether an environment is in the middle of an episode, bool [E]


@config("es", actions=ALL_ACTIONS)
class ES:
    """Evolution strategies; for any observations, and actions that are discrete, integers or floats. It ignores keys."""

    num_envs: int = field(default=256, doc="members, `E`, each with one environment; an even number. Usual: 64 to 10000.")
    unroll_length: int = field(
        default=500,
        doc="steps of every member per iteration, `T`. Only its first episode counts, and only up to `T` steps. Usual: the "
        "longest episode.",
    )
    learning_rate: Tunable = tunable(default=0.05, above=0, doc="step size of updates. Usual: 0.01 to 0.05.")
    anneal_learning_rate: bool = field(default=False, doc="whether the learning rate falls linearly to 0. Usual: False.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    hidden_sizes: tuple[int, ...] = field(default=(32, 32), doc="widths of dense layers. Usual: (64, 64); (128,) for images.")
    activation: Activation = field(default="tanh", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "tanh".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    noise_scale: Tunable = tunable(default=0.1, above=0, doc="deviation of the noise on every parameter. Usual: 0.02 to 0.1.")
    weight_decay: Tunable = tunable(default=0.005, low=0, doc="weight of L2 regularization. Usual: 0.005.")
    normalize_observations: bool = field(default=False, doc="standardize by running statistics. Usual: True for locomotion.")

    def check(self) -> None:
        """Raises ValueError if the population size is odd."""
        if self.num_envs % 2:
            raise ValueError(
                f"{type(self).__name__}.num_envs={self.num_envs} cannot be split into pairs of members; use "
                f"num_envs={self.num_envs + 1}"
            )

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        if is_on_host(env):
            raise TypeError(
                f"es resets all environments in every generation, but simulators on the host ({env_name(env)}) reset only when "
                "an episode ends; use ppo, a2c, impala, or an environment on devices"
            )
        venv = vectorize_with_statistics(env, self.num_envs, normalize_observations=self.normalize_observations)
        # A frozen wrapper keeps `reset` from starting new statistics of observations and from normalizing by them.
        reset_venv = dataclasses.replace(venv, frozen=True) if isinstance(venv, NormalizeObservation) else venv
        network = policy_and_value(make_torso(venv.observation_space, self), venv.action_space)
        to_env_action = action_transform(venv.action_space)
        optimizer = make_optimizer(self, epsilon=1e-8)

        def init_params(key, obs):
            params = network.init(key, obs)["params"]
            return {name: part for name, part in params.items() if name.startswith("actor")}

        def choose(params, obs):
            # The most probable action depends on neither the critic nor the scale, so the search omits both.
            scale = jnp.zeros(math.prod(venv.action_space.shape), jnp.float32)
            return to_env_action(network.policy({"params": {**params, "log_scale": scale}}, obs).mode())

        def init(key: jax.Array) -> ESState:
            params_key, env_key, start_key, actor_key = jax.random.split(key, 4)
            env_state, obs = venv.reset(start_key)
            params = init_params(params_key, obs)
            return ESState(
                params,
                optimizer.init(params),
                jax.random.split(actor_key, self.num_envs),
                env_key,
                env_state,
                obs,
                midway=jnp.zeros(self.num_envs, bool),
            )

        axes = logical_axes(
            ESState,
            params=P(),
            opt_state=P(),
            actor_keys=P("env"),
            env_key=P(),
            env_state=venv.axes,
            obs=P("env"),
            midway=P("env"),
        )

        @fragment(role="env")
        def start(key, env_state, obs, midway):
            key, start_key = jax.random.split(key)
            new_state, raw_obs = reset_venv.reset(start_key)
            new = (new_state, venv.observe(env_state, raw_obs))

            # Reset only environments in the middle of an episode; the others have reset already. Keep shared statistics.
            def begin(axes, old, new):
                return jax.tree.map(lambda a, b: jax.vmap(jnp.where)(midway, b, a), old, new) if axes == P("env") else old

            is_spec = lambda x: isinstance(x, P)
            return key, *jax.tree.map(begin, (venv.axes, P("env")), (env_state, obs), new, is_leaf=is_spec)

        @fragment(role="actor")
        def draw_seeds(keys):
            keys = jax.vmap(jax.random.split, out_axes=1)(keys)
            return keys[0], keys[1].reshape(-1, 2)[:, 0]

        @fragment(role="actor")
        def perturb(params, seeds):
            center, unravel = ravel_pytree(params)
            steps = self.noise_scale * draw_noise(seeds, center.size)
            members = center + jnp.stack([steps, -steps], axis=1).reshape(-1, center.size)
            return jax.vmap(unravel)(members)

        @fragment(role="actor")
        def act(population, obs):
            return jax.vmap(choose)(population, obs)

        @fragment(role="env")
        def env_step(env_state, action):
            return venv.step(env_state, action)

        @fragment(role="env")
        def score(reward, ended):
            return first_episode_return(reward, ended), ~ended[-1]

        pop_episodes = fragment(role="env", name="pop_episodes")(venv.pop_episodes)

        @fragment(role="learner")
        def gradients(params, seeds, fitness):
            center, unravel = ravel_pytree(params)
            return unravel(-estimate_gradient(centered_ranks(fitness), draw_noise(seeds, center.size), self.noise_scale))

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate):
            decayed_grads = jax.tree.map(lambda g, p: g + self.weight_decay * p, grads, params)
            updates, opt_state = optimizer.update(decayed_grads, opt_state, params, learning_rate=learning_rate)
            return optax.apply_updates(params, updates), opt_state, global_norm(grads)

        @fragment(role="learner")
        def learn(params, opt_state, progress, seeds, fitness):
            learning_rate = learning_rate_at(self, progress)
            grads = gradients(params, seeds, fitness)
            params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate)
            metrics = {
                "fitness": fitness.mean(),
                "fitness_max": fitness.max(),
                "grad_norm": grad_norm,
                **learning_rate_metric(learning_rate),
            }
            return params, opt_state, metrics

        def iteration(state: ESState, progress: Progress) -> tuple[ESState, Metrics]:
            env_key, env_state, obs = start(state.env_key, state.env_state, state.obs, state.midway)
            actor_keys, seeds = draw_seeds(state.actor_keys)
            population = perturb(state.params, seeds)

            def step(carry, _):
                env_state, t = env_step(carry[0], act(population, carry[1]))
                return (env_state, t.obs), (t.reward, t.terminated | t.truncated)

            (env_state, obs), outcomes = jax.lax.scan(step, (env_state, obs), None, length=self.unroll_length)
            fitness, midway = score(*outcomes)
            params, opt_state, metrics = learn(state.params, state.opt_state, progress, seeds, fitness)
            env_state, episodes = pop_episodes(env_state)
            return ESState(params, opt_state, actor_keys, env_key, env_state, obs, midway), {**metrics, **episodes}

        def choose_action(state: ESState, obs: jax.Array, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
            del key
            return choose(state.params, obs), carry

        return Agent(
            init=init,
            iteration=iteration,
            act=choose_action,
            axes=axes,
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=1,
            env=venv,
        )


def first_episode_return(reward: jax.Array, ended: jax.Array) -> jax.Array:
    """Sums rewards `[T, E]` until the first end of an episode, `ended` `[T, E]`; returns undiscounted returns `[E]`."""
    length = jnp.where(ended.any(axis=0), jnp.argmax(ended, axis=0) + 1, ended.shape[0])
    return jnp.sum(jnp.where(jnp.arange(ended.shape[0])[:, None] < length, reward, 0.0), axis=0)


def draw_noise(seeds: jax.Array, size: int) -> jax.Array:
    """Draws standard normal noise `[E / 2, D]` from typed keys `[E / 2]`; the same keys give the same noise in any fragment."""
    noise = jax.vmap(lambda seed: jax.random.normal(seed, (size,), jnp.float32))(seeds)
    # Without the barrier, XLA may fuse the last factor of the noise with the caller's factor, which changes the rounding.
    return jax.lax.optimization_barrier(noise)


def centered_ranks(fitness: jax.Array) -> jax.Array:
    """Maps returns `[E]` to ranks, spaced evenly over [-1/2, 1/2]; ties get the mean rank, and nan gets the lowest."""
    fitness = jnp.where(jnp.isnan(fitness), -jnp.inf, fitness)
    ordered = jnp.sort(fitness)
    num_below, num_up_to = (jnp.searchsorted(ordered, fitness, side=side) for side in ("left", "right"))
    return (num_below + num_up_to - 1) / (2 * (fitness.size - 1)) - 0.5


def estimate_gradient(utility: jax.Array, noise: jax.Array, noise_scale: float) -> jax.Array:
    """Estimates the gradient `[D]` of the expected utility at the center, from antithetic pairs of noise `[E / 2, D]`."""
    pairs = utility.reshape(-1, 2)
    return (pairs[:, 0] - pairs[:, 1]) @ noise / (utility.size * noise_scale)
