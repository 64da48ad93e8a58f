"""Agent transforms: functions from agent to agent. If one adds to the state, the old state is in the field `inner`.

An algorithm reads `config.learning_rate` in the same way whether it is a constant or not: the agent of a member is built
during tracing, from a config whose tunable fields are numbers from the member's state.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics, Progress, innermost, with_innermost
from msrl_jax.agents.transformations import BRANCHES, Scheduled
from msrl_jax.configs.names import value_of
from msrl_jax.configs.replacing import with_traced
from msrl_jax.envs.workers import processors
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.placement import Layout
from msrl_jax.fragments.support.checks import shown, whole
from msrl_jax.fragments.support.random_keys import is_key, key_for
from msrl_jax.replay import SHARD_AXIS
from msrl_jax.run.evaluation.history import SKIPPED

# Columns that a run adds to the metrics of its algorithm.
RESERVED = ("step", "iteration", "seconds", "steps_per_second", "eval_return", "eval_length")
UNRANKED = "the return is a sum over opposing teams or players, so it does not rank members"

_MEMBERS_PER_CORE = 32  # of PPO on CartPole, 16 to 64 need the same time per step on two cores, and 4,096 half as much again

_ELSEWHERE = {"env", SHARD_AXIS}  # logical axes of values that actors, environments and buffers compute


class Member(NamedTuple):
    """The state of a member whose config has its own numbers."""

    inner: Any  # the state of the agent
    numbers: dict[str, jax.Array]  # by field of the config. shape=() each, dtype=float32


def with_numbers(build: Callable[[Any], Agent], config: Any, names: tuple[str, ...]) -> Agent:
    """Makes an agent that reads config fields `names` from its state, a `Member`; `init` takes a key and optionally numbers."""
    agent = build(config)
    note = (
        f"The members of this run differ in {', '.join(names)} of {type(config).__name__}, so the program holds them "
        "as arrays. If the algorithm branches on such a field in Python or converts it to a Python number, use jnp.where "
        "instead, or declare the field with field and not with tunable; members can then not differ in it."
    )

    def of(numbers: Mapping[str, jax.Array]) -> Agent:
        return build(with_traced(config, numbers))

    def init(key: jax.Array, numbers: Mapping[str, jax.Array] | None = None) -> Member:
        given = {name: value_of(config, name) for name in names} if numbers is None else numbers
        own = {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}
        return Member(of(own).init(key), own)

    def iteration(state: Member, progress: Progress) -> tuple[Member, Metrics]:
        inner, metrics = of(state.numbers).iteration(state.inner, progress)
        return Member(inner, state.numbers), metrics

    def explained(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except BRANCHES as error:
                error.add_note(note)
                raise

        return call

    def of_state(name: str) -> Callable[..., Any]:
        return explained(lambda state, *args: getattr(of(state.numbers), name)(state.inner, *args))

    return dataclasses.replace(
        agent,
        init=explained(init),
        iteration=explained(iteration),
        axes=Member(agent.axes, P()),  # type: ignore[arg-type]
        act=of_state("act"),
        probabilities=None if agent.probabilities is None else of_state("probabilities"),
    )


def member_axes(axes: Any) -> Any:
    """Prepends the logical axis `"member"` to every entry of a prefix tree of PartitionSpecs."""
    return jax.tree.map(lambda spec: P("member", *(spec or ())), axes, is_leaf=lambda spec: spec is None or isinstance(spec, P))


def members(agent: Agent, numbers: Mapping[str, np.ndarray] | None = None, block: int | None = None) -> Agent:
    """Vectorizes an agent over independent members, each of which computes the same as a separate run.

    The state and the metrics have a leading dimension `M`. Data have no such dimension, because all members share them; `act`
    and `env` are for one member. `init` takes keys `[M]`; pass `numbers`, `[M]` each, if `agent` was made by `with_numbers`.
    With `block`, an iteration vectorizes over that many members at a time, and loops over the blocks.
    """
    dims, axes = 0, member_axes(agent.axes)
    if agent.data:
        own = innermost(agent.axes)
        of_own = own._replace(**{name: None if name in agent.data else 0 for name in own._fields})
        dims = with_innermost(jax.tree.map(lambda _: 0, agent.axes), of_own)
        axes = with_innermost(axes, innermost(axes)._replace(**{name: getattr(own, name) for name in agent.data}))

    def iteration(state: Any, progress: Progress) -> tuple[Any, Metrics]:
        if block is not None:
            return jax.lax.map(lambda member: agent.iteration(member, progress), state, batch_size=block)
        return jax.vmap(agent.iteration, in_axes=(dims, None), out_axes=(dims, 0))(state, progress)

    return dataclasses.replace(
        agent,
        # Initialize members sequentially: an orthogonal initializer under vmap is a batched QR, which takes minutes on a CPU.
        init=lambda keys: jax.lax.map(lambda x: agent.init(*x), (keys, numbers) if numbers else (keys,)),
        iteration=iteration,
        axes=axes,
    )


def block_size(agent: Agent, num_members: int, layout: Layout) -> int | None:
    """Returns how many members to vectorize over at a time; None for all of them.

    On one CPU, blocks stay in its caches, where all members would be read from memory in each update. Several devices divide
    the members. Blocks of buffers and of data would be copied in each iteration.
    """
    devices = {device for placement in layout.roles.values() for device in placement.devices}
    is_one_cpu = len(devices) == 1 and next(iter(devices)).platform == "cpu"
    axes = jax.tree.leaves(agent.axes, is_leaf=lambda x: x is None or isinstance(x, P))
    has_buffer = any(SHARD_AXIS in spec for spec in axes if spec is not None)
    if not is_one_cpu or layout.staleness or has_buffer or agent.data:
        return None
    most = _MEMBERS_PER_CORE * processors()
    block = max(n for n in range(1, most + 1) if num_members % n == 0)
    return block if most // 2 <= block < num_members else None


def state_of_member(agent: Agent, state: Any, number: int) -> Any:
    """Returns the state of one member from a state with a member dimension; all members share the data."""
    return agent.with_data(jax.tree.map(lambda x: x[number], agent.without_data(state)))


def map_members(f: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Applies a function to the leaves of `Counted` run states that have a member dimension: all except the count."""
    return state._replace(inner=jax.tree.map(f, state.inner, *(other.inner for other in others)))


def numbers_only(agent: Agent, name: str) -> Agent:
    """Makes an agent that raises an error for metrics that are not numbers."""
    if not isinstance(agent, Agent):
        raise TypeError(f"algorithm {name!r}: build returned {shown(agent)}; return an msrl_jax.algorithms.Agent")
    for number in ("steps_per_iteration", "updates_per_iteration"):
        whole(f"algorithm {name!r}: Agent.{number}", getattr(agent, number), least=int(number.startswith("steps")))
    if not hasattr(own := innermost(agent.axes), "_fields"):
        raise TypeError(
            f"algorithm {name!r} has axes of a {type(own).__name__}; its state is a NamedTuple, whose field 'inner', if it has "
            "one, is the state of the agent that a transformation widens"
        )

    def iteration(state: Any, progress: Progress) -> tuple[Any, Metrics]:
        result = agent.iteration(state, progress)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise TypeError(f"algorithm {name!r}: its iteration returns a {type(result).__name__}; return (state, metrics)")
        state, metrics = result
        for metric, value in metrics.items():
            dtype = getattr(value.total if isinstance(value, Mean) else value, "dtype", type(value))
            if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
                raise TypeError(f"algorithm {name!r} reports the metric {metric!r} as {shown(value)}; metrics are real numbers")
            if metric in RESERVED:
                raise ValueError(f"algorithm {name!r} reports the metric {metric!r}, as the run itself does; name it otherwise")
        return state, metrics

    return dataclasses.replace(agent, iteration=iteration)


def skip_nonfinite(agent: Agent) -> Agent:
    """Makes an agent that discards all values of learners if an iteration makes one non-finite; counters and keys advance.

    Running statistics of the environment are checked separately: they do not depend on the learner, so actors do not wait for
    it. Both checks select between the old and the new value, so every distribution policy computes the same.
    """

    def iteration(state: Any, progress: Progress) -> tuple[Any, Metrics]:
        after, metrics = agent.iteration(state, progress)
        kept, dropped = _unless_finite(learned(agent, state), learned(agent, after))
        after = with_learned(after, kept)
        old, new = innermost(state), innermost(after)
        if old.env_state != ():
            statistics, _ = _unless_finite(*(agent.env.statistics(s.env_state) for s in (old, new)))
            after = with_innermost(after, new._replace(env_state=agent.env.with_statistics(new.env_state, statistics)))
        return after, {**metrics, SKIPPED: dropped.astype(jnp.float32)}

    return dataclasses.replace(agent, iteration=iteration)


def learned(agent: Agent, state: Any) -> dict[tuple[int, str], Any]:
    """Returns the state fields, at all levels, that learners compute: they contain floats, but no environments or buffers."""

    def is_learned(value: Any, of_value: Any) -> bool:
        specs = jax.tree.leaves(of_value, is_leaf=lambda x: isinstance(x, P))
        axes = {axis for spec in specs for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
        return any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(value)) and not axes & _ELSEWHERE

    skipped, found, axes = {"inner", "env_state", "replay", *agent.data}, {}, agent.axes
    level = 0  # 0 is the outermost state
    while True:
        if not isinstance(state, Member | Scheduled):
            own = {name: getattr(state, name) for name in state._fields if name not in skipped}
            found |= {(level, name): x for name, x in own.items() if is_learned(x, getattr(axes, name))}
        if "inner" not in state._fields:
            return found
        state, axes, level = state.inner, axes.inner, level + 1


def with_learned(state: Any, fields: Mapping[tuple[int, str], Any], level: int = 0) -> Any:
    """Returns the state with other values for the fields that `learned` found."""
    own = {name: value for (at, name), value in fields.items() if at == level}
    if "inner" in state._fields:
        own["inner"] = with_learned(state.inner, fields, level + 1)
    return state._replace(**own)


def _unless_finite(old: Any, new: Any) -> tuple[Any, jax.Array]:
    """Returns `new`, or `old` if `new` is non-finite; and whether it is `old`."""
    floats = [x for x in jax.tree.leaves(new) if jnp.issubdtype(x.dtype, jnp.inexact)]
    bad = jnp.array([~jnp.isfinite(x).all() for x in floats]).any() if floats else jnp.bool(False)
    return jax.tree.map(lambda a, b: jnp.where(bad, a, b), old, new), bad


def fold_keys(state: Any, number: int) -> Any:
    """Folds a number into every typed key of a state, which changes all randomness."""

    def fold(x: Any) -> Any:
        if not is_key(x):
            return x
        return jax.vmap(lambda key: jax.random.fold_in(key_for("again", key), number))(x.reshape(-1)).reshape(x.shape)

    return jax.tree.map(fold, state)
