"""Attributes every operation of a compiled program to its fragment, from XLA's text (`compiled.as_text()`)."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from msrl_jax.fragments.plan.cost import DEFINITION, OP_NAME, WHILE, called, computations

_MODULE = re.compile(r"^HloModule ([\w.\-]+)", re.MULTILINE)


class Operation(NamedTuple):
    """An operation of a program."""

    kind: str  # such as "fusion"
    fragment: str | None  # the innermost one; "" outside fragments, None if unknown
    holder: str = ""  # the operation that contains it, such as a loop; empty if there is none


def innermost(fragments: Collection[str]) -> Callable[[str], str | None]:
    """Finds the innermost of these fragments in the line of an operation; "" if there is none, None if the line has no name.

    JAX names operations by their origin, such as `jit(iteration)/learn/while/body/jvp(gradients)/dot_general`.
    """
    written = {_as_written(name): name for name in fragments}
    names = "|".join(re.escape(name) for name in sorted(written, key=len, reverse=True))
    fragment = re.compile(rf"(?<!\w)(?:{names})(?!\w)") if names else None

    def find(line: str) -> str | None:
        op = OP_NAME.search(line)
        found = fragment.findall(op[1]) if op and fragment else []
        return None if op is None else written[found[-1]] if found else ""

    return find


def _as_written(name: str) -> str:
    """A name in XLA's quoting: non-ASCII bytes in octal."""
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(c if c.isascii() else "".join(f"\\{byte:03o}" for byte in c.encode()) for c in quoted)


def module_of(text: str) -> str:
    """The name of a program."""
    match = _MODULE.search(text)
    return match[1] if match else ""


def operations(text: str, fragments: Collection[str]) -> dict[str, Operation]:
    """The operations of a program by name.

    An operation without a JAX name belongs to the fragment of what it fuses, otherwise to the enclosing loop.

    Args:
      text: the program, as XLA prints it.
      fragments: the names of the fragments that it may contain.
    """
    (_, bodies), find = computations(text), innermost(fragments)
    found: dict[str, Operation] = {}
    users: dict[str, str] = {}  # the operation that each computation belongs to
    inside: dict[str, str] = {}  # the computation that contains each operation
    for computation, lines in bodies.items():
        for line in lines:
            if match := DEFINITION.match(line):
                name = match[2]
                inside[name] = computation
                loop = WHILE.search(line)
                parts = loop.groups() if loop else called(line)
                users |= dict.fromkeys(parts, name)
                fused = find(line) if match[4] not in ("fusion", "fusion-start") else _of(find, line, bodies, parts)
                found[name] = Operation(match[4], fused)
    for name, (kind, fragment, _) in found.items():
        around = name
        while fragment is None and (user := users.get(inside[around])) is not None:
            around, fragment = user, found[user].fragment
        found[name] = Operation(kind, fragment, users.get(inside[name], ""))
    return found


def _of(
    find: Callable[[str], str | None], line: str, bodies: Mapping[str, Sequence[str]], parts: Sequence[str]
) -> str | None:
    """The fragment of a fusion: the one in its own name, or that of its last part that has one."""
    if (own := find(line)) is not None:
        return own
    named = [fragment for part in parts for inner in bodies.get(part, ()) if (fragment := find(inner)) is not None]
    return named[-1] if named else None
