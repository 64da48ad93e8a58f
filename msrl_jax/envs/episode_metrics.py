"""Metrics of environments: scalars of the state after each step, such as whether the task is solved, reduced over episodes.

In the shape descriptions, `K` is the number of metrics of an environment, in the order of declaration.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.checks import shown, suggestion
from msrl_jax.fragments.support.text_values import read_values

PyTree: TypeAlias = Any

Reduction: TypeAlias = Literal["last", "sum", "mean", "max"]
"""How a metric is reduced over the steps of an episode: its last value, sum, mean or maximum."""

RESERVED = ("return", "length")  # every environment has `episode_return` and `episode_length`


class EpisodeMetrics(NamedTuple):
    """The metrics of the episodes of `E` environments, float32."""

    steps: jax.Array  # of the current episode. `[E]`
    values: jax.Array  # of the current episode so far; for a mean, the sum. `[E, K]`
    sums: jax.Array  # of the episodes completed since `pop`. `[E, K]`


def metrics_of(env: object) -> Mapping[str, Reduction]:
    """Returns the metrics that an environment, or a vector environment, declares; empty if there are none."""
    return getattr(env, "metrics", None) or {}


def read_declared(name: str, metrics: Mapping[str, Reduction] | str | None) -> Mapping[str, Reduction]:
    """Returns the metrics that a user declares for the environment `name`, possibly as text,
    `"x_velocity=mean,reward_ctrl=sum"`.
    """
    if isinstance(metrics, str):
        wrong = f"cannot read metrics={metrics!r} of {name}; write 'x_velocity=mean,reward_ctrl=sum'"
        metrics = read_values(metrics, wrong=wrong)
    check_declared(name, metrics := metrics or {})
    return metrics


def check_declared(name: str, metrics: Any) -> None:
    """Raises TypeError or ValueError unless `metrics` of the environment `name` maps valid names to reductions."""
    if not isinstance(metrics, Mapping):
        remedy = "pass a mapping of names to reductions, such as {'success': 'last'}"
        raise TypeError(f"{name}.metrics is {shown(metrics)}; {remedy}")
    for key, reduction in metrics.items():
        if not isinstance(key, str) or not key.isidentifier():
            raise ValueError(f"{name}.metrics has {key!r}; use letters, digits and _ for a name, such as 'success'")
        if key in RESERVED:
            raise ValueError(f"{name}.metrics has {key!r}, which every environment reports; choose another name")
        if reduction not in (reductions := get_args(Reduction)):
            near = suggestion(reduction, reductions) if isinstance(reduction, str) else ""
            raise ValueError(f"{name}.metrics[{key!r}] is {reduction!r}{near}; use one of {', '.join(reductions)}")


def reported(env: Any, state: PyTree) -> jax.Array | None:
    """Returns the metrics of one state `[K]` float32; None if the environment has none."""
    if not (declared := metrics_of(env)):
        return None
    report = env.report(state)
    return jnp.stack([jnp.asarray(report[name]).astype(jnp.float32) for name in declared])


def begin(env: object, num_envs: int) -> EpisodeMetrics | tuple[()]:
    """Returns the state before the first step; `()` without metrics."""
    if not (count := len(metrics_of(env))):
        return ()
    return EpisodeMetrics(jnp.zeros(num_envs, jnp.float32), *(jnp.zeros((num_envs, count), jnp.float32) for _ in range(2)))


def add(env: object, metrics_state: Any, metrics: jax.Array | None, counts: jax.Array | None = None) -> Any:
    """Returns the state after a step with `metrics` `[E, K]`; steps are counted where `counts` `[E]` bool is True, or
    everywhere.
    """
    if not metrics_state:
        return metrics_state
    assert metrics is not None
    kinds, old = np.array(list(metrics_of(env).values())), metrics_state.values
    values = jnp.where((kinds == "sum") | (kinds == "mean"), old + metrics, metrics)
    values = jnp.where((kinds == "max") & (metrics_state.steps[:, None] > 0), jnp.maximum(old, metrics), values)
    if counts is None:
        return metrics_state._replace(steps=metrics_state.steps + 1, values=values)
    return metrics_state._replace(steps=metrics_state.steps + counts, values=jnp.where(counts[:, None], values, old))


def so_far(env: object, episodes: EpisodeMetrics) -> jax.Array:
    """Returns the metrics of the current episodes. `[E, K]`"""
    is_mean = np.array([kind == "mean" for kind in metrics_of(env).values()])
    return jnp.where(is_mean, episodes.values / jnp.maximum(episodes.steps, 1)[:, None], episodes.values)


def end(env: object, episodes: Any, ended: jax.Array, done: jax.Array) -> Any:
    """Resets the episodes that have `ended`; keeps the metrics of those that are `done`, i.e. not lost. `[E]` bool"""
    if not episodes:
        return episodes
    sums = episodes.sums + jnp.where(done[:, None], so_far(env, episodes), 0)
    return EpisodeMetrics(jnp.where(ended, 0, episodes.steps), jnp.where(ended[:, None], 0, episodes.values), sums)


def pop(env: object, episodes: Any, count: jax.Array) -> tuple[Any, dict[str, Mean]]:
    """Removes the `count` completed episodes and returns their means, `episode_NAME`."""
    if not episodes:
        return episodes, {}
    totals = episodes.sums.sum(0)
    means = {f"episode_{name}": Mean(totals[k], count) for k, name in enumerate(metrics_of(env))}
    return episodes._replace(sums=jnp.zeros_like(episodes.sums)), means


def answered(t: Any) -> jax.Array | None:
    """In which environments a `TimeStep` has metrics. `[E]` bool; None for all."""
    return None if t.valid is None or t.metrics is None else ~jnp.isnan(t.metrics).all(-1)
