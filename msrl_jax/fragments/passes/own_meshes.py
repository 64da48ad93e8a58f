"""Checks that the meshes inside fragments (`shard_map`, sharding constraints) fit the fragments' placements."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from msrl_jax._compat import Jaxpr, jaxprs_in
from msrl_jax.fragments.passes.instructions import Instruction, Run, walk


def check_meshes(instructions: Sequence[Instruction]) -> None:
    """Refuses programs with a mesh whose devices are not the devices of their placement, in order.

    Args:
      instructions: the instructions.

    Raises:
      ValueError: if there is one; names the fragment, the operation and the devices.
    """
    for run in (i for i, _ in walk(instructions) if isinstance(i, Run)):
        own = run.placement.devices
        for name, mesh in _meshes(run.jaxpr.jaxpr):
            devices = tuple(mesh.devices.flat)
            if devices != own:
                raise ValueError(
                    f"{run.name!r} has a `{name}` over a mesh of its own, {_names(devices)}, but the policy places it at "
                    f"{run.placement}. Make the mesh of these devices in this order, leave the split to the placement (declare "
                    "it with `axes`), or choose a policy whose placement has the devices of the mesh"
                )


def _names(devices: Iterable[Any]) -> str:
    return f"[{', '.join(f'{d.platform}:{d.id}' for d in devices)}]"


def _meshes(jaxpr: Jaxpr) -> Iterator[tuple[str, Mesh]]:
    for eqn in (e for inner in jaxprs_in(jaxpr) for e in inner.eqns):
        params = [v for k, v in eqn.params.items() if k != "ctx_mesh"]  # the mesh that was set around a call
        for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Mesh | NamedSharding)):
            mesh = leaf.mesh if isinstance(leaf, NamedSharding) else leaf
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield eqn.primitive.name, mesh
