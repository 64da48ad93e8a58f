"""Where a program keeps a state: its leaves, and the registers of those that a policy delays."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax._compat import PyTreeDef
from msrl_jax.fragments.graph.trace import StateChecker, Traced, check_not_donated
from msrl_jax.fragments.passes.instructions import Value
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.runtime.executables import Executables
from msrl_jax.fragments.runtime.memory import array_bytes, lacking_memory
from msrl_jax.fragments.runtime.transfer import Leaves, initialize, put


class Delayed(NamedTuple):
    """The state of a run with stale actors: the algorithm's state, and the delayed parameters.

    Attributes:
      state: the algorithm's state.
      registers: the last values of every delayed leaf, oldest first.
    """

    state: Any
    registers: tuple[jax.Array, ...]


class StateLayout:
    """The leaves of a state, then the registers of its delayed leaves, with the shardings of all copies of each."""

    def __init__(
        self,
        tree: PyTreeDef,
        inputs: Sequence[tuple[Value, ...]],
        axes: Sequence[PartitionSpec],
        delayed: Sequence[int],
        staleness: int,
        traced: Traced,
    ):
        """Lays out states with the structure `tree`; `inputs` and `axes` have an entry for each leaf and register."""
        self.inputs, self.staleness = inputs, staleness
        self._tree, self._delayed = tree, delayed
        self._expected = StateChecker(tree, [copies[0].label for copies in inputs[: tree.num_leaves]], traced)
        self.copies = [
            tuple(v.placement.sharding(spec, v.aval.shape) for v in copies) for copies, spec in zip(inputs, axes, strict=True)
        ]

    @property
    def shardings(self) -> tuple[Any, tuple[NamedSharding, ...]]:
        """A pytree like the state with the sharding of each leaf, and the sharding of each register."""
        first, count = [copies[0] for copies in self.copies], self._tree.num_leaves
        return jax.tree.unflatten(self._tree, first[:count]), tuple(first[count:])

    @property
    def registers(self) -> dict[str, list[Value]]:
        """The registers of every delayed leaf at all placements that keep them, by its label, in order."""
        rows = iter(self.inputs[self._tree.num_leaves :])
        return {self.inputs[i][0].label: [v for _ in range(self.staleness) for v in next(rows)] for i in self._delayed}

    @property
    def nbytes(self) -> dict[Device, int]:
        """Bytes of the state on every device of this process."""
        totals: dict[Device, int] = {}
        for (leaf, *_), copies in zip(self.inputs, self.copies, strict=True):
            for sharding in copies:
                part = jax.ShapeDtypeStruct(sharding.shard_shape(leaf.aval.shape), leaf.aval.dtype)
                for device in sharding.addressable_devices:
                    totals[device] = totals.get(device, 0) + array_bytes(part)
        return totals

    def check_memory(self) -> None:
        """Raises ValueError if a state exceeds the memory of the devices; reports the bytes and the largest leaf."""
        if excess := lacking_memory(self.nbytes):
            devices, nbytes, limit = excess
            largest = max((copies[0] for copies in self.inputs), key=lambda v: v.nbytes)
            raise ValueError(
                f"the state takes {nbytes:,} bytes of {', '.join(map(str, devices))}, which has {limit:,}; its largest leaf is "
                f"{largest.label}, {largest.aval.dtype}{list(largest.aval.shape)}. Use a smaller capacity, fewer environments "
                "or seeds, shorter chunks of a recorded run, or a policy that splits that leaf over more devices"
            )

    def place(self, state: Any, *, copy: bool) -> Leaves:
        """Checks a state, and copies its leaves to where the program keeps them; into new memory if `copy`."""
        delayed = isinstance(state, Delayed)
        flat, tree = jax.tree.flatten(state.state if delayed else state)
        self._expected.check_tree(tree)
        num_registers = len(self.inputs) - len(flat)
        if delayed and len(state.registers) != num_registers:
            raise ValueError(
                f"the state has {len(state.registers)} registers of stale parameters, but the program has {num_registers} "
                f"(staleness={self.staleness}); pass program.unwrap(state) to start from its newest parameters"
            )
        self._expected.check_leaves(flat)
        for x in state.registers if delayed else ():
            check_not_donated(x, "a register of stale parameters")
        return put([*flat, *(state.registers if delayed else (flat[i] for i in self._of_registers()))], self.copies, copy)

    def initialize(self, init: Callable[..., Any], args: Sequence[Any], executables: Executables) -> Leaves:
        """Returns the leaves of the state that an initializer makes; large ones are computed where the program keeps them."""
        with executables.timed():
            closed, shapes = jax.make_jaxpr(init, return_shape=True)(*args)
        self._expected.check_tree(jax.tree.structure(shapes))
        return initialize(closed, jax.tree.leaves(args), self.copies, self._of_registers(), executables.evaluate)

    def unflatten(self, leaves: Leaves) -> Any:
        """Returns the state with these leaves; a `Delayed` if the policy has staleness."""
        flat = [copies[0] for copies in leaves]
        count = self._tree.num_leaves
        state = jax.tree.unflatten(self._tree, flat[:count])
        return Delayed(state, tuple(flat[count:])) if self.staleness else state

    def _of_registers(self) -> list[int]:
        """Returns the position of the leaf of each register."""
        return [i for i in self._delayed for _ in range(self.staleness)]
