"""Keys of programs: two programs share an executable if and only if their keys are equal.

A key contains the content of every constant and parameter, not its printed form. Objects without comparable content (opaque
objects) and all callables (which may contain a simulator, whatever they compare) are equal only to themselves; the key keeps
them alive, so that their ids stay unique.
"""

import dataclasses
import enum
import hashlib
import itertools
import struct
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Tracer,
    Var,
    aval,
    call_labels,
    context,
    is_conversion,
    is_dropped,
)
from msrl_jax.fragments.graph.marker import is_fragment
from msrl_jax.fragments.support.random_keys import is_key

# Contents longer than this many bytes are represented by their digest.
_LONG = 64


class _Same:
    """Wraps an object that is equal only to itself, and keeps it alive."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def program_key(closed: ClosedJaxpr) -> Hashable:
    """Returns the key of a jaxpr: keys are equal if and only if the programs are equal up to variable names."""
    return _closed_key(closed, value_key)


def computation_key(closed: ClosedJaxpr) -> Hashable:
    """Returns the key of a trace: the keys of two traces of one function are equal if and only if they compute the same values.

    Weak types only affect dtypes during tracing, so the key omits them, and conversions that change nothing else. All functions
    count as equal, as do all integer literals of one dtype, because each trace creates new functions and may number its parts,
    as checkify numbers its errors.
    """
    return _closed_key(closed, _traced_key, resolved=True)


def _closed_key(closed: ClosedJaxpr, of: Callable[[Any], Hashable], resolved: bool = False) -> Hashable:
    keys: dict[Hashable, int] = {}
    known: dict[int, int] = {}

    def numbered(jaxpr: Jaxpr) -> int:
        """Returns the number of a jaxpr's key, so that a jaxpr that is called often is visited and compared once."""
        if id(jaxpr) not in known:
            known[id(jaxpr)] = keys.setdefault(_jaxpr_key(jaxpr, of, resolved, numbered), len(keys))
        return known[id(jaxpr)]

    numbered(closed.jaxpr)  # becomes the last key
    return tuple(keys), tuple(map(of, closed.consts))


def _jaxpr_key(jaxpr: Jaxpr, of: Callable[[Any], Hashable], resolved: bool, numbered: Callable[[Jaxpr], int]) -> Hashable:
    numbers: dict[Var, Hashable] = {}
    unused = itertools.count()

    def kind(of: Any) -> Hashable:
        return of.update(weak_type=False) if resolved and getattr(of, "weak_type", False) else of

    def number(a: Atom) -> Hashable:
        if isinstance(a, Literal):
            return "literal", _number_key(a) if resolved else _literal_key(a)
        if is_dropped(a):
            return "dropped"
        if a not in numbers:
            numbers[a] = next(unused)
        return numbers[a]

    def atom(a: Atom) -> Hashable:
        return number(a), kind(a.aval)

    def equation(e: JaxprEqn) -> Hashable:
        labels = {"name", "role"} if is_fragment(e) else {*call_labels(e)}
        if resolved:
            labels.add("weak_type")
        params = tuple((k, param(v)) for k, v in sorted(e.params.items()) if k not in labels)
        return e.primitive, tuple(map(atom, e.invars)), tuple(map(atom, e.outvars)), params, context(e)

    def param(p: Any) -> Hashable:
        if isinstance(p, ClosedJaxpr):
            return "closed jaxpr", numbered(p.jaxpr), tuple(map(of, p.consts))
        if isinstance(p, Jaxpr):
            return "jaxpr", numbered(p)
        if isinstance(p, tuple | list):
            return type(p), tuple(map(param, p))
        return of(p)

    inputs = tuple(map(atom, [*jaxpr.constvars, *jaxpr.invars]))
    equations: list[Hashable] = []
    for e in jaxpr.eqns:
        if resolved and is_conversion(e) and aval(e.invars[0]).dtype == aval(e.outvars[0]).dtype:
            numbers[e.outvars[0]] = number(e.invars[0])
        else:
            equations.append(equation(e))
    return len(jaxpr.constvars), inputs, tuple(equations), tuple(map(atom, jaxpr.outvars))


def _number_key(literal: Literal) -> Hashable:
    """Returns the key of a literal in a trace: its value without weak type; None for integers, which may number parts."""
    dtype = aval(literal).dtype
    return np.asarray(literal.val, dtype).tobytes() if jnp.issubdtype(dtype, jnp.inexact) else None


def _literal_key(literal: Literal) -> Hashable:
    """Returns the content of a literal, which may be a Python number with the dtype of the literal's aval."""
    if isinstance(literal.val, jax.Array):
        return value_key(literal.val)
    return _content(np.asarray(literal.val, aval(literal).dtype))


def value_key(value: Any) -> Hashable:
    """Returns the key of a constant or parameter: equal keys if and only if a program cannot tell the values apart.

    For a number or array: the type (dtype, shape, weak type) and the bytes; for a container or dataclass: the type and the
    contents; otherwise the object itself, and for callables its identity.
    """
    if value is None or isinstance(value, bool | int | str | bytes | type | enum.Enum | np.dtype):
        return type(value), value
    if isinstance(value, np.ndarray | np.generic | jax.Array):  # before numbers: np.float64 is a float, without a weak type
        return _array_key(value)
    if isinstance(value, float):
        return float, struct.pack("d", value)
    if isinstance(value, complex):
        return complex, struct.pack("dd", value.real, value.imag)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(value_key, value))
    if isinstance(value, Mapping):
        return type(value), tuple((value_key(k), value_key(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(value_key, value))
    if callable(value) and not _is_wrapper(value):
        return _Same(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _compares_fields(type(value)):
        fields = tuple(value_key(getattr(value, f.name)) for f in dataclasses.fields(value))
        return type(value), fields, _hashable(value)
    return type(value), _hashable(value)


def _is_wrapper(value: Any) -> bool:
    """Whether a callable is a dataclass that JAX creates for each use of a function, e.g. of a host callback."""
    return dataclasses.is_dataclass(value) and type(value).__module__.partition(".")[0] == "jax"


def _compares_fields(cls: type) -> bool:
    """Whether objects of a dataclass are equal if their fields are equal."""
    return cls.__eq__ is not object.__eq__


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return None if dataclasses.is_dataclass(value) and _compares_fields(type(value)) else _Same(value)
    return value


def _array_key(x: Any) -> Hashable:
    if isinstance(x, jax.Array):
        if isinstance(x, Tracer) or not x.is_fully_addressable:
            return _Same(x)
        if is_key(x):
            return "key", x.dtype, _array_key(jax.random.key_data(x))
        return "array", x.dtype, x.shape, x.weak_type, _content(np.asarray(x))
    if x.dtype.hasobject:
        return _Same(x)
    return type(x), x.dtype, x.shape, getattr(x, "weak_type", False), _content(np.asarray(x))


def _content(x: np.ndarray) -> bytes:
    content = x.tobytes()
    return content if len(content) <= _LONG else hashlib.sha256(content).digest()


def _traced_key(value: Any) -> Hashable:
    """Like `value_key`, but all functions are equal, and weak types are ignored."""
    if isinstance(value, jax.Array) and value.weak_type:
        return value_key(jax.lax.convert_element_type(value, value.dtype))
    return type(value) if callable(value) and not isinstance(value, type) else value_key(value)
