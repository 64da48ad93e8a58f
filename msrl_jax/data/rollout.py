"""`record`: makes a data set by running a trained policy in its environment."""

import math
import os
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.data.check_spaces import agents_of, check_rows_fit
from msrl_jax.data.dataset import Dataset, columns, from_lanes
from msrl_jax.data.experience import RecordedEnvironment, to_row
from msrl_jax.data.formats import check_new, save
from msrl_jax.envs import Environment, has_agents, vectorize
from msrl_jax.envs.base import PyTree, close_simulators
from msrl_jax.envs.masks import check_returns_not_nan, mask_of, sample_legal
from msrl_jax.envs.param_sources import with_source
from msrl_jax.envs.params import GivenParams, ParamSampler
from msrl_jax.envs.privileged import with_privileged
from msrl_jax.fragments.graph.host_calls import host_errors
from msrl_jax.fragments.runtime.executables import MemoryCheckedJit
from msrl_jax.fragments.runtime.memory import check_fits_host, tree_bytes
from msrl_jax.fragments.support.checks import check_loaded, check_seed, whole
from msrl_jax.fragments.support.random_keys import key_for
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.replay import Transition

_CHUNK = 1024  # approximate number of rows on the device at a time


class _Acting(Protocol):
    """The behavior of a trained policy; `msrl_jax.run` implements it."""

    @property
    def env(self) -> Environment: ...
    def source(self, state: PyTree) -> ParamSampler | tuple[()]: ...
    def with_env_params(self, env_params: GivenParams) -> "_Acting": ...
    def take(self, state: PyTree) -> list[jax.Array]: ...
    def restore(self, leaves: list[jax.Array]) -> PyTree: ...
    def initial_carry(self, num_envs: int) -> PyTree: ...
    def act_with_carry(
        self, state: PyTree, obs: PyTree, carry: PyTree, key: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]: ...


class _TrainedRun(Protocol):
    """A run with a trained policy, such as `Result`."""

    @property
    def behavior(self) -> _Acting: ...
    @property
    def description(self) -> Mapping[str, Any]: ...
    @property
    def history(self) -> Mapping[str, np.ndarray]: ...
    def member_state(self, member: int | None = None) -> PyTree: ...


@entry
def record(
    result: _TrainedRun,
    steps: int,
    path: str | os.PathLike | None = None,
    *,
    epsilon: float | None = None,
    seed: int = 0,
    member: int | None = None,
    num_envs: int = 16,
    env_params: GivenParams | None = None,
) -> Dataset:
    """Runs a trained policy, and records every step.

    Args:
      result: the run; its policy acts in the environment of training.
      steps: number of rows of the data set, `N`. Each of the parallel environments has `N / num_envs` rows, rounded up; the
        last one may have fewer. The last episode of each environment is cut, so fewer environments cut fewer episodes.
      path: file for the data set, as in `save`; None writes no file.
      epsilon: probability of a uniformly random legal action, drawn per agent; other actions are the most probable ones. None
        samples all actions from the policy.
      seed: seed of all randomness.
      member: the population member that acts, in a run with several seeds; the best one if None.
      num_envs: number of parallel environments.
      env_params: the source of environment parameters, as in `Result.evaluate`.

    Returns:
      The data set.

    Raises:
      ValueError: if a number is out of range, if the file exists, if its suffix is unknown, if the rows or the environments
        need more memory than there is, or if an observation has no legal action.
      TypeError: if actions are not arrays.
    """
    check_loaded(result)
    steps, num_envs, seed = whole("steps", steps), whole("num_envs", num_envs), check_seed(seed)
    if epsilon is not None and not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon={epsilon}: use a probability, or None to sample actions from the policy")
    if path is not None:
        check_new(path)
    behavior, num_envs = result.behavior, min(num_envs, steps)
    if env_params is not None:
        behavior = behavior.with_env_params(env_params)
    length = math.ceil(steps / num_envs)
    chunk = min(length, max(_CHUNK // num_envs, 1))
    member_state = result.member_state(member)
    full_env = with_privileged(behavior.env)
    env = with_source(vectorize(full_env, num_envs), jax.device_get(behavior.source(member_state)))
    check_rows_fit(full_env, steps, "Record fewer steps at a time, each with another seed and file")
    space, random_share = RecordedEnvironment(full_env, chunk).action_space, 1.0 if epsilon is None else epsilon
    num_agents = len(behavior.env.agents) if has_agents(behavior.env) else 0  # type: ignore[attr-defined]

    def choose(state: PyTree, obs: PyTree, carry: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
        if epsilon is None:
            return behavior.act_with_carry(state, obs, carry, key)
        action, carry = behavior.act_with_carry(state, obs, carry)
        whether, *keys = jax.random.split(key, num_envs + 1)
        mask, keys = mask_of(obs), jnp.stack(keys)
        draw = jax.vmap(lambda key, mask: space.sample(key) if mask is None else sample_legal(key, mask))
        if num_agents:
            keys, draw = jax.vmap(lambda key: jax.random.split(key, num_agents))(keys), jax.vmap(draw)
        random: Any = draw(keys, mask)
        at_random = jax.random.uniform(whether, keys.shape, jnp.float32) < random_share
        return jnp.where(at_random.reshape(*keys.shape, *[1] * (random.ndim - keys.ndim)), random, action), carry

    def roll(leaves: list[jax.Array], running: PyTree) -> tuple[PyTree, Transition]:
        state, fresh = behavior.restore(leaves), behavior.initial_carry(num_envs)

        def step(running, _):
            env_state, obs, carry, key = running
            key, action_key = jax.random.split(key)
            action, carry = choose(state, obs, carry, action_key)
            env_state, t = env.step(env_state, action)
            carry = jax.tree.map(lambda fresh_leaf, leaf: jax.vmap(jnp.where)(t.ended, fresh_leaf, leaf), fresh, carry)
            return (env_state, t.obs, carry, key), to_row(obs, jnp.asarray(action, action_dtype), t)

        return jax.lax.scan(step, running, None, length=chunk)

    play = MemoryCheckedJit(jax.jit(roll), f"the program that plays num_envs={num_envs:,} environments", "Use fewer of them")
    action_dtype = np.dtype(space.dtype)  # type: ignore[arg-type]
    leaves = behavior.take(member_state)
    key, env_key = jax.random.split(key_for("data", jax.random.key(seed)))
    envs = tree_bytes(jax.eval_shape(env.reset, env_key))
    check_fits_host(envs, f"the state of num_envs={num_envs:,} environments", "Use fewer of them")
    running = (*env.reset(env_key), behavior.initial_carry(num_envs), key)
    parts = []
    with host_errors():
        for _ in range(math.ceil(length / chunk)):
            running, rows = play(leaves, running)
            parts.append(jax.device_get(rows))
    close_simulators(env)
    rows = jax.tree.map(lambda *x: np.concatenate(x)[:length], *parts)
    action_choice = "sampled actions" if epsilon is None else f"greedy except for epsilon={epsilon:g}"
    description = result.description
    about = {
        "env": description["env"],
        "observation_space": str(full_env.observation_space),
        "action_space": str(behavior.env.action_space),
        **agents_of(behavior.env),
        "made_by": f"{description['algorithm']}, {action_choice}",
        "trained_steps": int(result.history["step"][-1]) if len(result.history["step"]) else 0,
        "seed": seed,
    }
    check_returns_not_nan(behavior.env, rows.reward)
    dataset = from_lanes(columns(rows), about).select(slice(steps))
    if path is not None:
        save(dataset, path)
    return dataset
