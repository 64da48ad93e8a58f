"""Which random keys a program uses: it runs, and every key that draws numbers or makes other keys is noted."""

import functools
from collections import Counter, defaultdict
from typing import NamedTuple

import jax
import numpy as np

from msrl_jax import _compat

_DRAWS = ("random_bits", "random_gamma")
_DERIVES = ("random_split", "random_fold_in")


class Use(NamedTuple):
    """What an operation did with one key."""

    kind: str  # "drawn from", "derived from" or "made"
    key: tuple[int, ...]
    where: str  # the line of Python


def key_uses(function, *args):
    """Every use of a key in a run of a function, in no order; what its results do not depend on does not count."""
    closed = jax.make_jaxpr(function)(*args)
    noted = []
    watched = _watched(_compat.drop_unused(closed.jaxpr), noted)
    # The notes need little of the function: what is left compiles fast.
    watched = _compat.drop_unused(watched.replace(outvars=[], debug_info=watched.debug_info._replace(result_paths=())))
    jax.jit(_compat.jaxpr_as_fun(_compat.ClosedJaxpr(watched, closed.consts)))(*jax.tree.leaves(args))
    jax.effects_barrier()
    return [Use(kind, tuple(key), where) for kind, where, keys in noted for key in keys.reshape(-1, keys.shape[-1]).tolist()]


def reused_keys(uses):
    """What is wrong with the uses of keys, as text: a key drawn from twice, one drawn from and derived from, or one made twice.

    A key that is split twice, or to which the same number is folded in twice, makes the same keys twice; so does a key that is
    split and to which a small number is folded in, since these are the same operation.
    """
    places = {kind: defaultdict(list) for kind in ("drawn from", "derived from", "made")}
    for use in uses:
        places[use.kind][use.key].append(use.where)
    found = Counter()
    for kind in ("drawn from", "made"):
        found.update(f"{kind} {len(at)} times: {sorted({*at})}" for at in places[kind].values() if len(at) > 1)
    drawn, derived = places["drawn from"], places["derived from"]
    for key in drawn.keys() & derived.keys():
        found[f"drawn from at {sorted({*drawn[key]})} and derived from at {sorted({*derived[key]})}"] += 1
    return [f"{count} keys {text}" for text, count in sorted(found.items())]


def _watched(jaxpr, noted, caller="unknown"):
    """A jaxpr that notes the keys that it uses, as do all that it holds."""
    equations = []
    for eqn in jaxpr.eqns:
        where = _compat.source_line(eqn) or caller
        if eqn.primitive.name in (*_DRAWS, *_DERIVES):
            equations += _compat.inline_function(eqn, functools.partial(_noting, eqn, where, noted))
        else:
            new = _compat.replace_jaxprs(eqn, functools.partial(_watched, noted=noted, caller=where))
            equations.append(new.replace(effects=_effects(new, *_compat.sub_jaxprs(new))))
    return jaxpr.replace(eqns=equations, effects=_effects(jaxpr, *equations))


def _effects(*parts):
    return frozenset().union(*(part.effects for part in parts))


def _noting(eqn, where, noted, *operands):
    result = eqn.primitive.bind(*operands, **eqn.params)

    def note(kind, keys):
        jax.debug.callback(lambda data: noted.append((kind, where, np.asarray(data))), jax.random.key_data(keys))

    if eqn.primitive.name in _DRAWS:
        note("drawn from", operands[0])
    else:
        note("derived from", operands[0])
        note("made", result)
    return [result]
