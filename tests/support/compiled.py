"""What compiled programs consist of, and what they exchange between devices."""

import math
import re

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from msrl_jax.fragments.placement import AXES
from msrl_jax.fragments.plan.hlo import COLLECTIVES, module_of
from msrl_jax.policies import Placement


def shardings(agent, mesh):
    """Shardings of the state over a mesh with one axis, over which every logical axis is split."""
    placement = Placement("all", mesh, tuple((axis, "env") for axis in AXES))
    spec = lambda axes, part: jax.tree.map(lambda x: placement.sharding(axes, x.shape), part)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    return jax.tree.map(spec, agent.axes, state, is_leaf=lambda x: isinstance(x, PartitionSpec))


def instructions(compiled):
    """The instructions of all computations of a compiled program."""
    module = module_of(compiled)
    return [made for computation in module.computations for made in module.instructions(computation)]


def exchanges(compiled):
    """The instructions with which the devices of a compiled program exchange data."""
    return [made for made in instructions(compiled) if made.kind.removesuffix("-start") in COLLECTIVES]


def elements(shape):
    """The number of elements of a shape as XLA writes it, or of all shapes of a tuple."""
    return sum(math.prod(int(d) for d in size.split(",") if d) for size in re.findall(r"\w+\[([\d,]*)\]", shape))


def collectives(agent):
    """Name and number of elements of every collective in the compiled iteration, environments split over all devices."""
    mesh = Mesh(np.array(jax.devices()), ("env",))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    compiled = jax.jit(agent.iteration, in_shardings=(shardings(agent, mesh),)).lower(state).compile()
    found = [(made.kind.removesuffix("-start"), elements(made.shape)) for made in exchanges(compiled)]
    return sorted(found, key=lambda c: c[1])
