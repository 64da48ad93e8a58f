"""Keys of programs: two programs share an executable if and only if their keys are equal.

A key holds the content of every constant and parameter, not a printed form. What has no content to compare (a function,
an opaque object) counts as equal to itself alone; the key keeps it alive, so that its identity is never given to another.
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
from msrl_jax.fragments.marker import is_fragment

# Contents longer than this many bytes are represented by their digest.
_LONG = 64


class _Same:
    """Stands for an object that equals nothing but itself, and keeps it alive."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def program_key(closed: ClosedJaxpr) -> Hashable:
    """A key that two jaxprs share exactly if they are the same program up to the names of variables.

    Args:
      closed: a closed jaxpr.

    Returns:
      A hashable value.
    """
    return _closed_key(closed, value_key)


def computation_key(closed: ClosedJaxpr) -> Hashable:
    """A key that two traces of one function share exactly if they compute the same values.

    Weak types decide over dtypes while a function is traced, and over nothing afterwards. So they are left out, and so are
    conversions that change nothing else. Functions count as equal, and so do literals of one dtype: each trace makes new
    functions, and may number what it traces, as checkify does with its errors.

    Args:
      closed: a trace of the function.

    Returns:
      A hashable value.
    """
    return _closed_key(closed, _traced_key, resolved=True)


def _closed_key(closed: ClosedJaxpr, of: Callable[[Any], Hashable], resolved: bool = False) -> Hashable:
    return _jaxpr_key(closed.jaxpr, of, resolved), tuple(map(of, closed.consts))


def _jaxpr_key(jaxpr: Jaxpr, of: Callable[[Any], Hashable], resolved: bool) -> Hashable:
    numbers: dict[Var, Hashable] = {}
    unused = itertools.count()

    def kind(of: Any) -> Hashable:
        return of.update(weak_type=False) if resolved and getattr(of, "weak_type", False) else of

    def number(a: Atom) -> Hashable:
        if isinstance(a, Literal):
            return "literal", None if resolved else _literal_key(a)
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
            return "closed jaxpr", _closed_key(p, of, resolved)
        if isinstance(p, Jaxpr):
            return "jaxpr", _jaxpr_key(p, of, resolved)
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


def _literal_key(literal: Literal) -> Hashable:
    """The content of a literal, which may stand there as a Python number of the type that its aval says."""
    if isinstance(literal.val, jax.Array):
        return value_key(literal.val)
    return _content(np.asarray(literal.val, aval(literal).dtype))


def value_key(value: Any) -> Hashable:
    """A key that two values share exactly if a program cannot tell them apart.

    Args:
      value: a constant or a parameter of an equation, without jaxprs in it.

    Returns:
      A hashable value: of numbers and arrays the type (dtype, shape, weak type) and the bytes, of containers and data
      classes the type and what they hold, of other objects the object itself.
    """
    if value is None or isinstance(value, bool | int | str | bytes | type | enum.Enum | np.dtype):
        return type(value), value
    if isinstance(value, float):
        return float, struct.pack("d", value)
    if isinstance(value, complex):
        return complex, struct.pack("dd", value.real, value.imag)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array_key(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(value_key, value))
    if isinstance(value, Mapping):
        return type(value), tuple((value_key(k), value_key(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(value_key, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _compares_fields(type(value)):
        fields = tuple(value_key(getattr(value, f.name)) for f in dataclasses.fields(value))
        return type(value), fields, _hashable(value)
    return type(value), _hashable(value)


def _compares_fields(cls: type) -> bool:
    """Whether objects of a data class are what their fields are."""
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
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return "key", x.dtype, _array_key(jax.random.key_data(x))
        return "array", x.dtype, x.shape, x.weak_type, _content(np.asarray(x))
    if x.dtype.hasobject:
        return _Same(x)
    return type(x), x.dtype, x.shape, getattr(x, "weak_type", False), _content(np.asarray(x))


def _content(x: np.ndarray) -> bytes:
    content = x.tobytes()
    return content if len(content) <= _LONG else hashlib.sha256(content).digest()


def _traced_key(value: Any) -> Hashable:
    """As `value_key`, but any function equals any other, and weak types do not count."""
    if isinstance(value, jax.Array) and value.weak_type:
        return value_key(jax.lax.convert_element_type(value, value.dtype))
    return type(value) if callable(value) and not isinstance(value, type) else value_key(value)
