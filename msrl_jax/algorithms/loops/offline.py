"""What algorithms share that learn from data alone: batches of a data set, updates from them, and what held-out episodes say.

In the shape descriptions, `B` denotes the batch size, `K` the number of updates per iteration and `G` the shards of the data.
An iteration draws `K` batches at once and learns from one after another, then measures on one held-out batch. No environment
is stepped: its spaces say what networks look like, and evaluations play in it apart from training.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax import data, envs
from msrl_jax.algorithms.base import Agent, Metrics
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.loops.mixing import load_data
from msrl_jax.algorithms.loops.off_policy import Batch, Learner, Rule
from msrl_jax.algorithms.loops.optimizer import learning_rate_at
from msrl_jax.algorithms.networks.actor_and_critics import check_bounded
from msrl_jax.algorithms.networks.actor_critic import action_transform
from msrl_jax.algorithms.networks.distributions import Categorical, TanhNormal
from msrl_jax.data import Dataset
from msrl_jax.envs import Discrete, Environment, Space
from msrl_jax.fragments import fragment
from msrl_jax.replay import Replay, ReplayState


class Data(NamedTuple):
    """A data set as two buffers, of whole episodes each.

    Attributes:
      training: what is learned from.
      validation: what was held out; `()` if nothing was.
    """

    training: ReplayState
    validation: ReplayState | tuple[()]


class OfflineState(NamedTuple):
    """All of a run.

    Attributes:
      params: parameters of all networks that are trained.
      target_params: what follows them slowly.
      opt_state: states of the optimizers.
      iteration: iterations done. shape=(), dtype=int32
      key: the learner's key. shape=()
      data_key: the buffers' key, which draws. shape=()
      env_state: none, `()`.
      data: the data; `()` in a state that acts only.
    """

    params: Any
    target_params: Any
    opt_state: Any
    iteration: jax.Array
    key: jax.Array
    data_key: jax.Array
    env_state: tuple[()]
    data: Data | tuple[()]


def check_config(config: Any) -> None:
    """Raises ValueError on a field, common to the algorithms that learn from data alone, whose value cannot work."""
    check.check_common(config)
    check.check_numbers(config, "validation_fraction", low=0.0)
    if config.validation_fraction >= 1:
        raise ValueError(
            f"{type(config).__name__}.validation_fraction={config.validation_fraction!r} holds everything out; use less than 1"
        )


def check_actions(name: str, space: Space) -> None:
    """Raises TypeError or ValueError unless a space of actions is `Discrete` or a bounded `Box` of floats."""
    if not isinstance(space, Discrete):
        check_bounded(name, space)


def learning_rate_of(config: Any) -> Callable[[jax.Array], jax.Array]:
    """The learning rate of update number `count`, which falls to 0 over `total_steps` if the config says so."""
    anneal_over = config.total_steps if config.anneal_learning_rate else None
    return lambda count: learning_rate_at(count, config.learning_rate, 1, anneal_over)


def log_likelihood(policy: Categorical | TanhNormal, action: jax.Array) -> jax.Array:
    """Log-likelihoods `[B]` of actions of a data set.

    Vectors are kept off their bounds, where the density of a squashed distribution says nothing.

    Args:
      policy: the distribution.
      action: choices `[B]`, or vectors in [-1, 1] `[B, D]`.

    Returns:
      The log-likelihoods, in nats. `[B]`
    """
    return policy.log_prob(action) if isinstance(policy, Categorical) else policy.log_prob(jnp.clip(action, -0.999, 0.999))


def reward_scale(dataset: Dataset) -> float:
    """The range of the returns of a data set's episodes, per step of the longest one; 1 if all are alike.

    Kostrikov et al., 2021, arXiv 2110.06169, section 5.2, where the longest episode has 1000 steps.
    """
    episodes = dataset.episodes
    return float(np.ptp(episodes.returns) / episodes.length.max()) or 1.0


def offline_agent(env: Environment, config: Any, rule: Rule, name: str) -> Agent:
    """Builds an agent that learns from a data set.

    Args:
      env: the environment that it shall act in.
      config: with the fields `data`, `validation_fraction`, `batch_size`, `num_updates`, `shards`, `storage` and, if the rule
        looks ahead, `discount` and perhaps `normalize_rewards`.
      rule: what is learned from a batch.
      name: what errors call the algorithm.

    Returns:
      The agent, whose steps are updates. Its metrics are what the rule reports, means over the updates; and, of a batch of
      episodes that are never learned from, the same with `validation_` before the name. Without data it acts, but does not
      train.

    Raises:
      ValueError: if the data do not fit the environment, or sizes do not fit.
    """
    shards = math.gcd(config.batch_size, 8) if config.shards is None else config.shards
    venv = envs.vectorize(env, shards)
    (training, validation), held = _buffers(env, config, shards)
    num_updates, batch_size = config.num_updates, config.batch_size

    def init(key: jax.Array) -> OfflineState:
        params_key, learner_key, data_key = jax.random.split(key, 3)
        example = jax.eval_shape(env.reset, key)[1]
        obs = jnp.zeros((1, *example.shape), example.dtype)
        return OfflineState(*rule.init(params_key, obs), jnp.int32(0), learner_key, data_key, (), ())

    @fragment(role="buffer")
    def draw(data, key):
        key, held_out_key, *keys = jax.random.split(key, num_updates + 2)
        batches = jax.vmap(training.sample, (None, 0))(data.training, jnp.stack(keys)).experience
        return key, batches, None if validation is None else validation.sample(data.validation, held_out_key).experience

    @fragment(role="learner")
    def learn(learner, iteration, key, batches, held_out):
        key, held_out_key, *keys = jax.random.split(key, num_updates + 2)

        def step(learner, inputs):
            count, experience, key = inputs
            batch = Batch(experience, jnp.ones(batch_size), key)
            learner, _, stats = rule.update(learner, batch, count, jnp.bool_(True))
            return learner, stats

        counts = iteration * num_updates + jnp.arange(num_updates)
        learner, stats = jax.lax.scan(step, learner, (counts, batches, jnp.stack(keys)))
        metrics = jax.tree.map(lambda x: x.mean(), dict(stats))
        if held_out is not None:
            measured = rule.measure(learner, Batch(held_out, jnp.ones(len(held_out.reward)), held_out_key))
            metrics |= {f"validation_{name}": x for name, x in measured.items()}
        return learner, iteration + 1, key, metrics

    def iteration(state: OfflineState) -> tuple[OfflineState, Metrics]:
        if isinstance(state.data, tuple) and not state.data:
            raise ValueError(f"{name} learns from data alone, but there is none; give data='experience.npz', or a Dataset")
        data_key, batches, held_out = draw(state.data, state.data_key)
        learner = Learner(state.params, state.target_params, state.opt_state)
        learner, count, key, metrics = learn(learner, state.iteration, state.key, batches, held_out)
        return OfflineState(*learner, count, key, data_key, (), state.data), metrics

    to_env_action = action_transform(venv.action_space)

    def act(state: OfflineState, obs: jax.Array, key: jax.Array | None) -> jax.Array:
        return to_env_action(rule.choose_action(state.params, obs, key))

    data_axes: Any = P()
    if held is not None:
        data_axes = Data(training.axes, () if validation is None else validation.axes)
    axes = OfflineState._make([P(), P(), P(), P(), P(), P(), P(), data_axes])
    return Agent(
        init, iteration, act, axes, num_updates, num_updates, venv, data={} if held is None else {"data": held}, unit="updates"
    )


def _buffers(env: Environment, config: Any, shards: int) -> tuple[tuple[Any, Replay | None], Data | None]:
    """The buffers of training and of validation, and what they hold."""
    if config.data is None:
        return (None, None), None
    dataset = load_data(config.data, env)
    storage = None if config.storage is None else {"obs": config.storage, "next_obs": config.storage}

    def make(dataset: Dataset, batch_size: int) -> tuple[Replay, ReplayState]:
        discount = getattr(config, "discount", 1.0)
        return data.buffer(dataset, batch_size=batch_size, discount=discount, shards=shards, storage=storage)

    if getattr(config, "normalize_rewards", False):
        dataset = dataclasses.replace(dataset, reward=dataset.reward / reward_scale(dataset))
    if not config.validation_fraction:
        training, held = make(dataset, config.batch_size)
        return (training, None), Data(held, ())
    learned, held_out = dataset.split(config.validation_fraction)
    training, held = make(learned, config.batch_size)
    validation, held_back = make(held_out, min(config.batch_size, max(len(held_out) // shards, 1) * shards))
    return (training, validation), Data(held, held_back)
