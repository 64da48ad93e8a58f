"""Making a data set of what a trained policy does."""

import math
import os
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.data.dataset import Dataset, from_lanes
from msrl_jax.data.files import check_new, save
from msrl_jax.data.recorder import Recorded
from msrl_jax.envs import vectorize
from msrl_jax.replay import Transition

if TYPE_CHECKING:
    from msrl_jax.training import Result

_CHUNK = 1024
"""Rows that are held on the device at once, about."""


def record(
    result: "Result",
    steps: int,
    path: str | os.PathLike | None = None,
    *,
    epsilon: float | None = None,
    seed: int = 0,
    member: int | None = None,
    num_envs: int = 16,
) -> Dataset:
    """Lets a trained policy act, and keeps what happens.

    Args:
      result: the run whose policy acts, in the environment that it was trained in.
      steps: rows of the data set, `N`; environments that run side by side have the same share each, but for the last one.
      path: a file to write the data set to, as `save` does.
      epsilon: the probability of a uniformly random action; otherwise the most probable one is taken. If None, actions are
        sampled from the policy.
      seed: where the randomness starts.
      member: which seed of a run of several acts; the best one if None.
      num_envs: how many environments run side by side.

    Returns:
      The data set.

    Raises:
      ValueError: if a number is out of range, or the file exists or has a suffix that names no format.
      TypeError: if observations or actions are no arrays.
    """
    for name, value in {"steps": steps, "num_envs": num_envs}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: use an integer of at least 1")
    if epsilon is not None and not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon={epsilon}: use a probability, or None to sample actions from the policy")
    if path is not None:
        check_new(path)
    actor, num_envs = result.actor, min(num_envs, steps)
    length = math.ceil(steps / num_envs)
    chunk = min(length, max(_CHUNK // num_envs, 1))
    env = vectorize(actor.env, num_envs)
    space, limit = Recorded(actor.env, chunk).action_space, 1.0 if epsilon is None else epsilon

    def choose(state: Any, obs: Any, memory: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        if epsilon is None:
            return actor.act_with_memory(state, obs, memory, key)
        action, memory = actor.act_with_memory(state, obs, memory)
        whether, *keys = jax.random.split(key, num_envs + 1)
        random: Any = jax.vmap(space.sample)(jnp.stack(keys))
        at_random = jax.random.uniform(whether, (num_envs,)) < limit
        return jnp.where(at_random.reshape(-1, *[1] * (random.ndim - 1)), random, action), memory

    @jax.jit
    def roll(leaves: list[jax.Array], carry: Any) -> tuple[Any, Transition]:
        state, fresh = actor.restore(leaves), actor.initial_memory(num_envs)

        def step(carry, _):
            env_state, obs, memory, key = carry
            key, action_key = jax.random.split(key)
            action, memory = choose(state, obs, memory, action_key)
            env_state, t = env.step(env_state, action)
            done = t.terminated | t.truncated
            memory = jax.tree.map(lambda new, old: jax.vmap(jnp.where)(done, new, old), fresh, memory)
            row = Transition(obs, jnp.asarray(action, action_dtype), t.reward, t.terminated, t.truncated, t.final_obs)
            return (env_state, t.obs, memory, key), row

        return jax.lax.scan(step, carry, None, length=chunk)

    action_dtype = np.dtype(space.dtype)  # type: ignore[arg-type]
    leaves = actor.take(result.member_state(member))
    key, env_key = jax.random.split(jax.random.key(seed))
    carry = (*env.reset(env_key), actor.initial_memory(num_envs), key)
    parts = []
    for _ in range(math.ceil(length / chunk)):
        carry, rows = roll(leaves, carry)
        parts.append(jax.device_get(rows))
    rows = jax.tree.map(lambda *x: np.concatenate(x)[:length], *parts)
    how = "sampled actions" if epsilon is None else f"greedy but for epsilon={epsilon:g}"
    description = result.description
    about = {
        "env": description["env"],
        "observation_space": str(actor.env.observation_space),
        "action_space": str(actor.env.action_space),
        "made_by": f"{description['algorithm']}, {how}",
        "trained_steps": description["total_steps"],
        "seed": seed,
    }
    dataset = from_lanes(rows, about).select(slice(steps))
    if path is not None:
        save(dataset, path)
    return dataset
