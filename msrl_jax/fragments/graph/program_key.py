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
_MAX_LITERAL_BYTES = 64


class _Identity:
    """Wraps an object that is equal only to itself, and keeps it alive."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

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
    return _closed_key(closed, _traced_key, ignores_weak_types=True)


def _closed_key(closed: ClosedJaxpr, key_of: Callable[[object], Hashable], ignores_weak_types: bool = False) -> Hashable:
    keys: dict[Hashable, int] = {}
    numbers_by_id: dict[int, int] = {}

    def number_of(jaxpr: Jaxpr) -> int:
        """Returns the number of a jaxpr's key, so that a jaxpr that is called often is visited and compared once."""
        if id(jaxpr) not in numbers_by_id:
            numbers_by_id[id(jaxpr)] = keys.setdefault(_jaxpr_key(jaxpr, key_of, ignores_weak_types, number_of), len(keys))
        return numbers_by_id[id(jaxpr)]

    number_of(closed.jaxpr)  # becomes the last key
    return tuple(keys), tuple(map(key_of, closed.consts))


def _jaxpr_key(
    jaxpr: Jaxpr, key_of: Callable[[object], Hashable], ignores_weak_types: bool, number_of: Callable[[Jaxpr], int]
) -> Hashable:
    numbers: dict[Var, Hashable] = {}
    unused = itertools.count()

    def strong_type(array_type: Any) -> Hashable:
        return (
            array_type.update(weak_type=False) if ignores_weak_types and getattr(array_type, "weak_type", False) else array_type
        )

    def atom_number(a: Atom) -> Hashable:
        if isinstance(a, Literal):
            return "literal", _number_key(a) if ignores_weak_types else _literal_key(a)
        if is_dropped(a):
            return "dropped"
        if a not in numbers:
            numbers[a] = next(unused)
        return numbers[a]

    def atom_key(a: Atom) -> Hashable:
        return atom_number(a), strong_type(a.aval)

    def equation_key(e: JaxprEqn) -> Hashable:
        labels = {"name", "role"} if is_fragment(e) else {*call_labels(e)}
        if ignores_weak_types:
            labels.add("weak_type")
        params = tuple((k, param_key(v)) for k, v in sorted(e.params.items()) if k not in labels)
        return e.primitive, tuple(map(atom_key, e.invars)), tuple(map(atom_key, e.outvars)), params, context(e)

    def param_key(p: object) -> Hashable:
        if isinstance(p, ClosedJaxpr):
            return "closed jaxpr", number_of(p.jaxpr), tuple(map(key_of, p.consts))
        if isinstance(p, Jaxpr):
            return "jaxpr", number_of(p)
        if isinstance(p, tuple | list):
            return type(p), tuple(map(param_key, p))
        return key_of(p)

    inputs = tuple(map(atom_key, [*jaxpr.constvars, *jaxpr.invars]))
    equations: list[Hashable] = []
    for e in jaxpr.eqns:
        if ignores_weak_types and is_conversion(e) and aval(e.invars[0]).dtype == aval(e.outvars[0]).dtype:
            numbers[e.outvars[0]] = atom_number(e.invars[0])
        else:
            equations.append(equation_key(e))
    return len(jaxpr.constvars), inputs, tuple(equations), tuple(map(atom_key, jaxpr.outvars))


def _number_key(literal: Literal) -> Hashable:
    """Returns the key of a literal in a trace: its value without weak type; None for integers, which may number parts."""
    dtype = aval(literal).dtype
    return np.asarray(literal.val, dtype).tobytes() if jnp.issubdtype(dtype, jnp.inexact) else None


def _literal_key(literal: Literal) -> Hashable:
    """Returns the content of a literal, which may be a Python number with the dtype of the literal's aval."""
    if isinstance(literal.val, jax.Array):
        return value_key(literal.val)
    return _content_bytes(np.asarray(literal.val, aval(literal).dtype))


def value_key(value: object) -> Hashable:
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
        return _Identity(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _compares_fields(type(value)):
        fields = tuple(value_key(getattr(value, f.name)) for f in dataclasses.fields(value))
        return type(value), fields, _hashable(value)
    return type(value), _hashable(value)


def _is_wrapper(value: object) -> bool:
    """Whether a callable is a dataclass that JAX creates for each use of a function, e.g. of a host callback."""
    return dataclasses.is_dataclass(value) and type(value).__module__.partition(".")[0] == "jax"


def _compares_fields(cls: type) -> bool:
    """Whether objects of a dataclass are equal if their fields are equal."""
    return cls.__eq__ is not object.__eq__


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return None if dataclasses.is_dataclass(value) and _compares_fields(type(value)) else _Identity(value)
    return value


def _array_key(x: np.ndarray | np.generic | jax.Array) -> Hashable:
    if isinstance(x, jax.Array):
        if isinstance(x, Tracer) or not x.is_fully_addressable:
            return _Identity(x)
        if is_key(x):
            return "key", x.dtype, _array_key(jax.random.key_data(x))
        return "array", x.dtype, x.shape, x.weak_type, _content_bytes(np.asarray(x))
    if x.dtype.hasobject:
        return _Identity(x)
    return type(x), x.dtype, x.shape, getattr(x, "weak_type", False), _content_bytes(np.asarray(x))


def _content_bytes(x: np.ndarray) -> bytes:
    content = x.tobytes()
    return content if len(content) <= _MAX_LITERAL_BYTES else hashlib.sha256(content).digest()


def _traced_key(value: object) -> Hashable:
    """Like `value_key`, but all functions are equal, and weak types are ignored."""
    if isinstance(value, jax.Array) and value.weak_type:
        return value_key(jax.lax.convert_element_type(value, value.dtype))
    return type(value) if callable(value) and not isinstance(value, type) else value_key(value)
