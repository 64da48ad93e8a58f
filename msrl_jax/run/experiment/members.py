"""Members of a run: their numbers, their state with the dimension `M`, and the fields that a member learns.

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
from msrl_jax.configs.replacing import replace_unchecked
from msrl_jax.envs.base import PyTree
from msrl_jax.envs.workers import processors
from msrl_jax.fragments.placement import Layout
from msrl_jax.replay import SHARD_AXIS

UNRANKED = "the return is a sum over opposing teams or players, so it does not rank members"

# For PPO on CartPole and two cores, 16 to 64 members need the same CPU time per step, and 4,096 at once half as much again.
_MAX_PER_CORE = 32

_ELSEWHERE = {"env", SHARD_AXIS}  # logical axes of values that actors, environments and buffers compute


class Member(NamedTuple):
    """The state of a member whose config has its own numbers."""

    inner: PyTree  # the state of the agent
    numbers: dict[str, jax.Array]  # by field of the config. shape=() each, dtype=float32


def with_numbers(build: Callable[[Any], Agent], config: Any, names: tuple[str, ...]) -> Agent:
    """Makes an agent that reads config fields `names` from its state, a `Member`; `init` takes a key and optionally numbers."""
    agent = build(config)
    note = (
        f"The members of this run differ in {', '.join(names)} of {type(config).__name__}, so the program holds them "
        "as arrays. If the algorithm branches on such a field in Python or converts it to a Python number, use jnp.where "
        "instead, or declare the field with field and not with tunable; members can then not differ in it."
    )

    def agent_of(numbers: Mapping[str, jax.Array]) -> Agent:
        return build(replace_unchecked(config, numbers))

    def init(key: jax.Array, numbers: Mapping[str, jax.Array] | None = None) -> Member:
        values = {name: value_of(config, name) for name in names} if numbers is None else numbers
        member_numbers = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
        return Member(agent_of(member_numbers).init(key), member_numbers)

    def iteration(state: Member, progress: Progress) -> tuple[Member, Metrics]:
        inner, metrics = agent_of(state.numbers).iteration(state.inner, progress)
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
        return explained(lambda state, *args: getattr(agent_of(state.numbers), name)(state.inner, *args))

    return dataclasses.replace(
        agent,
        init=explained(init),
        iteration=explained(iteration),
        axes=Member(agent.axes, P()),  # type: ignore[arg-type]
        act=of_state("act"),
        probabilities=None if agent.probabilities is None else of_state("probabilities"),
    )


def member_axes(axes: PyTree) -> PyTree:
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
    is_one_cpu = len(layout.devices) == 1 and layout.devices[0].platform == "cpu"
    axes = jax.tree.leaves(agent.axes, is_leaf=lambda x: x is None or isinstance(x, P))
    has_buffer = any(SHARD_AXIS in spec for spec in axes if spec is not None)
    if not is_one_cpu or layout.staleness or has_buffer or agent.data:
        return None
    max_size = _MAX_PER_CORE * processors()
    size = max(n for n in range(1, max_size + 1) if num_members % n == 0)
    return size if max_size // 2 <= size < num_members else None


def state_of_member(agent: Agent, state: PyTree, number: int) -> PyTree:
    """Returns the state of one member from a state with a member dimension; all members share the data."""
    return agent.with_data(jax.tree.map(lambda x: x[number], agent.without_data(state)))


def map_members(f: Callable[..., Any], state: PyTree, *others: PyTree) -> PyTree:
    """Applies a function to the leaves of `Counted` run states that have a member dimension: all except the count."""
    return state._replace(inner=jax.tree.map(f, state.inner, *(other.inner for other in others)))


def learned_fields(agent: Agent, state: PyTree) -> dict[tuple[int, str], PyTree]:
    """Returns the state fields, at all levels, that learners compute: they contain floats, but no environments or buffers."""

    def is_learned(value: PyTree, of_value: PyTree) -> bool:
        specs = jax.tree.leaves(of_value, is_leaf=lambda x: isinstance(x, P))
        axes = {axis for spec in specs for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
        return any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(value)) and not axes & _ELSEWHERE

    skipped, fields, axes = {"inner", "env_state", "replay", *agent.data}, {}, agent.axes
    level = 0  # 0 is the outermost state
    while True:
        if not isinstance(state, Member | Scheduled):
            level_fields = {name: getattr(state, name) for name in state._fields if name not in skipped}
            fields |= {(level, name): x for name, x in level_fields.items() if is_learned(x, getattr(axes, name))}
        if "inner" not in state._fields:
            return fields
        state, axes, level = state.inner, axes.inner, level + 1


def with_learned_fields(state: PyTree, fields: Mapping[tuple[int, str], PyTree], level: int = 0) -> PyTree:
    """Returns the state with other values for the fields that `learned_fields` found."""
    changes = {name: value for (field_level, name), value in fields.items() if field_level == level}
    if "inner" in state._fields:
        changes["inner"] = with_learned_fields(state.inner, fields, level + 1)
    return state._replace(**changes)
