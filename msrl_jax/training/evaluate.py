"""Evaluation: greedy episodes, one whole episode per environment, so that short ones do not count more often."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import vectorize
from msrl_jax.training.acting import Actor
from msrl_jax.training.history import decimals

MAX_STEPS = 10_000


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The episodes of one evaluation.

    Attributes:
      returns: undiscounted sum of the raw rewards of every episode. shape=[episodes] or [M, episodes], dtype=float32
      lengths: environment steps of every episode. shape=[episodes] or [M, episodes], dtype=int32
      finished: whether the episode ended by itself (terminated or truncated) before the cap on steps; the return of
        one that did not is that of its first steps. shape=[episodes] or [M, episodes], dtype=bool
    """

    returns: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray

    @property
    def mean_return(self) -> float | np.ndarray:
        """Mean return over the episodes; an array `[M]` for `M` members."""
        return _mean(self.returns)

    @property
    def mean_length(self) -> float | np.ndarray:
        """Mean length over the episodes; an array `[M]` for `M` members."""
        return _mean(self.lengths)

    def __repr__(self) -> str:
        mean, spread = self.mean_return, np.std(self.returns, axis=-1, dtype=np.float64)
        digits = decimals(mean, spread)
        cut = int((~self.finished).sum())
        note = f", {cut} cut off at the cap on steps" if cut else ""
        return (
            f"Evaluation({self.returns.shape[-1]} episodes: return {_fixed(mean, digits)} ± {_fixed(spread, digits)}, "
            f"length {_fixed(self.mean_length, 1)}{note})"
        )


def _mean(values: np.ndarray) -> float | np.ndarray:
    mean = np.mean(values, axis=-1, dtype=np.float64)
    return mean if np.ndim(mean) else float(mean)


def _fixed(values: float | np.ndarray, digits: int) -> str:
    if not np.ndim(values):
        return f"{values:.{digits}f}"
    return f"[{', '.join(_fixed(value, digits) for value in np.asarray(values))}]"


class _Episodes(NamedTuple):
    """The episodes of an evaluation on their way; `running` marks the ones that count still."""

    step: jax.Array
    env_state: Any
    obs: Any
    memory: Any
    returns: jax.Array
    lengths: jax.Array
    running: jax.Array


def make_evaluator(
    actor: Actor, episodes: int, *, members: bool = False, max_steps: int = MAX_STEPS
) -> Callable[[Any, jax.Array], Evaluation]:
    """Builds a function that plays greedy episodes, all at once and on one device.

    Args:
      actor: the behavior to evaluate.
      episodes: how many episodes; every one runs in an environment of its own until it ends.
      members: whether states and keys have a leading member dimension `M`.
      max_steps: a cap on the steps of an episode, for environments that need not end.

    Returns:
      A function `(state, key) -> Evaluation` of a run's state, wherever it lies, and a typed key (or keys `[M]`). It
      compiles once. Observation statistics are those in `state`, frozen.

    Raises:
      ValueError: if `episodes` or `max_steps` is below 1.
    """
    if episodes < 1 or max_steps < 1:
        raise ValueError(f"an evaluation needs at least one episode of one step; got {episodes=}, {max_steps=}")
    env = vectorize(actor.env, episodes)

    def play(leaves: list[jax.Array], key: jax.Array):
        state = actor.restore(leaves)
        env_state, obs = env.reset(key)

        def step(carry: _Episodes) -> _Episodes:
            action, memory = actor.act_with_memory(state, carry.obs, carry.memory)
            env_state, t = env.step(carry.env_state, action)
            # An environment that is done begins another episode, which does not count (and which its agent takes for
            # a part of the first), until the last one is done.
            return _Episodes(
                step=carry.step + 1,
                env_state=env_state,
                obs=t.obs,
                memory=memory,
                returns=carry.returns + jnp.where(carry.running, t.reward, 0.0),
                lengths=carry.lengths + carry.running,
                running=carry.running & ~(t.terminated | t.truncated),
            )

        none = jnp.zeros(episodes, jnp.int32)
        start = _Episodes(
            jnp.int32(0), env_state, obs, actor.initial_memory(episodes), jnp.zeros(episodes), none, jnp.ones(episodes, bool)
        )
        end = jax.lax.while_loop(lambda c: c.running.any() & (c.step < max_steps), step, start)
        return end.returns, end.lengths, ~end.running

    compiled = jax.jit(jax.vmap(play) if members else play)

    def evaluate(state: Any, key: jax.Array) -> Evaluation:
        return Evaluation(*jax.device_get(compiled(actor.take(state), key)))

    return evaluate
