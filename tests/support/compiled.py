"""What compiled iterations exchange between devices."""

import re

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from msrl_jax.fragments.placement import AXES
from msrl_jax.policies import Placement


def shardings(agent, mesh):
    """Shardings of the state over a mesh with one axis, over which every logical axis is split."""
    placement = Placement("all", mesh, tuple((axis, "env") for axis in AXES))
    spec = lambda axes, part: jax.tree.map(lambda x: placement.sharding(axes, x.shape), part)  # noqa: E731
    state = jax.eval_shape(agent.init, jax.random.key(0))
    return jax.tree.map(spec, agent.axes, state, is_leaf=lambda x: isinstance(x, PartitionSpec))


def collectives(agent):
    """Name and number of elements of every collective in the compiled iteration, environments split over all devices."""
    mesh = Mesh(np.array(jax.devices()), ("env",))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    compiled = jax.jit(agent.iteration, in_shardings=(shardings(agent, mesh),)).lower(state).compile()
    found = []
    for shapes, name in re.findall(r"= (.*?) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", compiled.as_text()):
        sizes = re.findall(r"\w+\[([\d,]*)\]", shapes)
        found.append((name, sum(int(np.prod([int(d) for d in size.split(",") if d])) for size in sizes)))
    return sorted(found, key=lambda c: c[1])

COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(")
