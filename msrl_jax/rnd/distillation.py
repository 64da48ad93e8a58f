"""Random network distillation (Burda et al., 2018, arXiv 1810.12894): intrinsic advantages for the actor-critic algorithms.

The target is a fixed random network, and the predictor is trained to match it. Its error at an observation is the intrinsic
reward of the previous step: large if few similar observations were seen. Intrinsic returns continue across episodes. They have
a separate value network instead of the paper's second head, so that the networks of algorithms need no change. In the shape
descriptions, `T` is the length of an unroll and `E` the number of environments.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.agents.transformations import wrapped
from msrl_jax.envs import VectorEnvironment, running, spaces
from msrl_jax.envs.masks import unmasked
from msrl_jax.envs.running import RunningStatistics
from msrl_jax.fragments import fragment
from msrl_jax.loops.minibatches import shuffle
from msrl_jax.loops.trajectory import Trajectory
from msrl_jax.losses.values import value_loss
from msrl_jax.networks.layers import dense
from msrl_jax.networks.torso import NetworkFields, make_torso
from msrl_jax.networks.unrolls import flatten, unflatten
from msrl_jax.returns.advantages import gae
from msrl_jax.returns.means import mean

DISCOUNT, LAMBDA = 0.99, 0.95
"""Discount factor per step and lambda of intrinsic returns and advantages."""
CLIP = 5.0
"""Maximum size of a standardized observation."""
NUM_TAUGHT = 32
"""Number of environments whose data train the predictor: with more, a random share of all data is used (the paper's rule)."""


class RNDState(NamedTuple):
    """The state of RND."""

    target: Any  # parameters of the target network, which are constant
    params: Any  # parameters of the predictor and the value network
    opt_state: optax.OptState
    key: jax.Array  # for shuffling and for choosing the predictor's data; iterations fold in their numbers. []
    observations: RunningStatistics
    returns: RunningStatistics  # of the discounted sums of intrinsic rewards
    discounted_return: jax.Array  # these sums so far, [E]


class Exploring(NamedTuple):
    """The state of an agent with intrinsic rewards."""

    inner: Any  # the state of the agent
    rnd: RNDState


def exploring(agent: Agent, config: Any) -> Agent:
    """Adds intrinsic rewards to an agent.

    Args:
      agent: an actor-critic whose iteration takes a function that adds a bonus to its trajectory.
      config: the config for `random_network_distillation`, and its optimizer.

    Returns:
      The new agent.
    """
    epsilon, rms_decay = getattr(config, "epsilon", 1e-5), getattr(config, "rms_decay", 0.99)
    optimizer = make_optimizer(config, epsilon=epsilon, rms_decay=rms_decay)
    begin, add_intrinsic_rewards = random_network_distillation(config, agent.env, optimizer)

    def init(key: jax.Array) -> Exploring:
        return Exploring(agent.init(key), begin(key))

    def iteration(state: Exploring, progress: Progress) -> tuple[Exploring, Metrics]:
        results = []

        def add_bonus(trajectory: Trajectory, last_obs: Any) -> Trajectory:
            rnd, trajectory, metrics = add_intrinsic_rewards(state.rnd, trajectory, last_obs, progress)
            results.append((rnd, metrics))
            return trajectory

        inner, metrics = agent.iteration(state.inner, progress, add_bonus)
        ((rnd, rnd_metrics),) = results
        return Exploring(inner, rnd), {**metrics, **rnd_metrics}

    axes: Any = Exploring(agent.axes, P())  # type: ignore[arg-type]
    return wrapped(agent, init=init, iteration=iteration, axes=axes)


def random_network_distillation(
    config: Any, venv: VectorEnvironment, optimizer: optax.GradientTransformationExtraArgs
) -> tuple[Callable[[jax.Array], Any], Callable[[Any, Trajectory, Any, Progress], tuple[Any, Trajectory, Metrics]]]:
    """Makes `key -> rnd` and `(rnd, trajectory, last_obs, progress) -> (rnd, trajectory, metrics)`.

    Args:
      config: has `intrinsic_coef`, and the settings of networks, unrolls and optimizers.
      venv: the vector environment.
      optimizer: the policy's optimizer, also used for predictor and value network.

    Returns:
      A function that initializes RND, and one that adds a `bonus` to a trajectory and then learns from it. Statistics of
      observations are updated with the trajectory first, instead of with the paper's random steps before training.
    """
    space, prepare, networks = _networks(venv.observation_space, config)
    example = spaces.zeros(space)
    share = min(1.0, NUM_TAUGHT / config.num_envs)
    plan: Any = SimpleNamespace(
        unroll_length=config.unroll_length,
        num_epochs=getattr(config, "num_epochs", 1),
        num_minibatches=math.gcd(config.unroll_length, getattr(config, "num_minibatches", 1)),
    )

    def init(key: jax.Array) -> RNDState:
        key, *keys = jax.random.split(jax.random.fold_in(key, 1_000), 4)  # the algorithm uses the first splits of this key
        params = {name: network.init(k, example) for (name, network), k in zip(networks.items(), keys, strict=True)}
        target = params.pop("target")
        empty = running.empty(spaces.struct(space)), running.empty(jax.ShapeDtypeStruct((), jnp.float32))
        return RNDState(target, params, optimizer.init(params), key, *empty, jnp.zeros(config.num_envs, jnp.float32))

    def standardize(observations: RunningStatistics, obs: Any) -> jax.Array:
        x = (prepare(obs) - observations.mean) / jnp.sqrt(observations.var + 1e-8)
        return jnp.clip(x, -CLIP, CLIP)

    def error(target: Any, params: Any, x: jax.Array) -> jax.Array:
        difference = networks["predictor"].apply(params["predictor"], x) - networks["target"].apply(target, x)
        return jnp.square(difference).mean(-1)

    @fragment(role="learner")
    def intrinsic_advantages(rnd, t, last_obs):
        """Computes a reward for each step: the error at the observation from which the next step acts."""
        observations = running.update(rnd.observations, prepare(flatten(t.obs)))
        stream = jax.tree.map(lambda x, last: jnp.concatenate([x, last[None]]), t.obs, last_obs)
        x = standardize(observations, flatten(stream))
        reward = unflatten(error(rnd.target, rnd.params, x), config.unroll_length + 1)[1:]
        if t.valid is not None:
            reward = jnp.where(t.valid, reward, 0.0)

        def add(total, reward):
            total = DISCOUNT * total + reward
            return total, total

        discounted_return, sums = jax.lax.scan(add, rnd.discounted_return, reward)
        returns = running.update(rnd.returns, flatten(sums))
        reward /= jnp.sqrt(returns.var + 1e-8)
        value = unflatten(networks["value"].apply(rnd.params["value"], x)[..., 0], config.unroll_length + 1)
        no_ends = jnp.zeros_like(t.terminated)
        advantage = gae(reward, value[:-1], value[1:], no_ends, no_ends, t.valid, discount=DISCOUNT, gae_lambda=LAMBDA)
        rnd = rnd._replace(observations=observations, returns=returns, discounted_return=discounted_return)
        return rnd, advantage, value[:-1] + advantage, mean(reward, t.valid)

    @fragment(role="learner")
    def distill(params, batch, rnd, minibatch):
        times, key = minibatch
        obs, valid, goal = jax.tree.map(lambda x: flatten(x[times]), batch)
        x, predictor_mask = standardize(rnd.observations, obs), jax.random.bernoulli(key, share, goal.shape)
        if valid is not None:
            predictor_mask &= valid

        def loss(params):
            value = networks["value"].apply(params["value"], x)[..., 0]
            predictor_loss = mean(error(rnd.target, params, x), predictor_mask)
            return predictor_loss + mean(value_loss(value, goal), valid), {"rnd_loss": predictor_loss}

        return jax.grad(loss, has_aux=True)(params)

    @fragment(role="server")
    def apply_update(learner, grads, learning_rate):
        params, opt_state = learner
        updates, opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
        return optax.apply_updates(params, updates), opt_state

    @fragment(role="learner")
    def add_intrinsic_rewards(rnd, t, last_obs, progress):
        rnd, advantage, goal, reward = intrinsic_advantages(rnd, t, last_obs)
        key, times = shuffle(jax.random.fold_in(rnd.key, progress.iteration.low), plan)
        rate = learning_rate_at(config, progress)  # an adaptive rate keeps its initial value
        minibatches = times, jax.random.split(key, len(times))
        batch = t.obs, t.valid, goal

        def update(learner, minibatch):
            grads, metrics = distill(learner[0], batch, rnd, minibatch)
            return apply_update(learner, grads, rate), metrics

        (params, opt_state), stats = jax.lax.scan(update, (rnd.params, rnd.opt_state), minibatches)
        trajectory = t._replace(bonus=config.intrinsic_coef * advantage)
        metrics = {"intrinsic_reward": reward, "rnd_loss": stats["rnd_loss"].mean()}
        return rnd._replace(params=params, opt_state=opt_state), trajectory, metrics

    return init, add_intrinsic_rewards


def _networks(space: spaces.Space, config: NetworkFields) -> tuple[spaces.Space, Callable[[Any], jax.Array], dict[str, Any]]:
    """Returns the space of the networks' inputs, the function that computes them from observations `[B, ...]`, and the
    networks.

    Inputs are images or numeric vectors. The predictor has two more layers than the target (the paper's appendix). RND does
    not use custom networks here, since they may not accept standardized observations.
    """
    kind = config.network if isinstance(config.network, str) else "auto"
    sizes, size = config.hidden_sizes, config.hidden_sizes[-1]
    fields: Any = SimpleNamespace(network=kind, hidden_sizes=sizes, activation=config.activation, layer_norm=config.layer_norm)
    torso, prepare = make_torso(space, fields), lambda obs: unmasked(obs).astype(jnp.float32)
    if not torso.is_batched:
        vector_space, prepare = spaces.flat_space(space), lambda obs: spaces.flatten(space, unmasked(obs))
        torso = torso.clone(observation_space=vector_space)
    make = lambda sizes, size: nn.Sequential([torso.clone(hidden_sizes=sizes), dense(size, 1.0)])
    networks = {"target": make(sizes, size), "predictor": make((*sizes, size, size), size), "value": make(sizes, 1)}
    return torso.observation_space, prepare, networks
