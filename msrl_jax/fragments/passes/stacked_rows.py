"""Rows of stacked arrays: how the programs of a loop read the current row of its inputs, and store that of its results."""

from dataclasses import dataclass

from msrl_jax._compat import Atom, ShapedArray, Var, aval, make_jaxpr_of
from msrl_jax.fragments.passes.instructions import LoopCarry, RunProgram, Value
from msrl_jax.fragments.placement import Placement


@dataclass(frozen=True)
class StackedRow:
    """A variable that is the current row of a stacked array."""

    stacked: Value

    @property
    def aval(self) -> ShapedArray:
        """Its shape and dtype."""
        return self.stacked.aval.update(shape=self.stacked.aval.shape[1:])


@dataclass(frozen=True)
class ResultBuffer:
    """The buffer of a stacked result of a loop: the program that makes a row writes it there."""

    carry: LoopCarry  # the buffer, carried through the loop
    row: Atom  # in the body
    placement: Placement

    @property
    def pair(self) -> tuple[Value, Value]:
        """The buffer before and after a row is written, as in `RunProgram.writes`."""
        return self.carry.body_in, self.carry.body_out


def read_row(row: StackedRow, value: Value, row_number: Value) -> RunProgram:
    """Returns a program that reads a row into a value."""
    var = Var(row.aval)
    copy = make_jaxpr_of([], [var], [var], "read row")
    return RunProgram("read row", value.placement, copy, (row.stacked,), (value,), (0,), index=row_number)


def write_row(buffer: ResultBuffer, source: Value | StackedRow, row_number: Value) -> RunProgram:
    """Returns a program that writes a value, or a row of another array, to the current row of a buffer."""
    var = Var(aval(buffer.row))
    copy = make_jaxpr_of([], [var], [var], "write row")
    value, rows = (source.stacked, (0,)) if isinstance(source, StackedRow) else (source, ())
    return RunProgram("write row", buffer.placement, copy, (value,), (), rows, (buffer.pair,), row_number)
