"""Batch normalization of critics instead of target networks, as in CrossQ (Bhatt et al., 2024, OpenReview PczQtTsTIX).

What the dense layers of a critic see is normalized, and what comes out of each. The values of a batch and of the steps after it
come from one pass, normalized by the statistics of both together (Ioffe & Szegedy, 2015, arXiv 1502.03167), so the critics
themselves give the targets. The actor's loss takes running means of these statistics. They are what a learner has in place of
target parameters, and they move by `tau`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.networks.layers import CustomNetworks, Network
from msrl_jax.algorithms.networks.policies import taken_value
from msrl_jax.envs import Discrete, Space


def check_batch_norm(config: Any, action_space: Space | None = None) -> None:
    """Raises ValueError if the critics of a config are to be normalized, but have no place for it."""
    whole = isinstance(config.network, CustomNetworks)
    network = "CustomNetworks(...)" if whole else "'simba'"
    obstacles = {
        "those of discrete actions see none; use layer_norm=True": isinstance(action_space, Discrete),
        f"core={config.core!r} learns from windows of steps; use core='none'": config.core != "none",
        f"network={network} has other layers; use 'mlp'": whole or config.network == "simba",
    }
    for obstacle, is_there in obstacles.items():
        if config.batch_norm and is_there:
            where = f"{type(config).__name__}.batch_norm"
            raise ValueError(f"{where} normalizes dense layers of critics that see observations and actions, but {obstacle}")


def initial_statistics(params: Any) -> Any:
    """Means of 0 and variances of 1, for all layers of critics that normalize."""
    layers = {name: p for name, p in params["params"]["torso"].items() if name.startswith("BatchNorm")}
    return {"torso": {n: {"mean": jnp.zeros_like(p["bias"]), "var": jnp.ones_like(p["scale"])} for n, p in layers.items()}}


def critics_of_batch(
    config: Any, critics: Network, params: Any, target: Any, inputs: tuple, next_inputs: tuple, backup: Callable[[Any], Any]
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """What an update needs of critics, with or without batch normalization.

    Args:
      config: has `batch_norm`.
      critics: the critics.
      params: their parameters.
      target: those of the target critics; or running statistics, with batch normalization.
      inputs: observations and actions.
      next_inputs: the next observations, and actions of a policy there; or observations alone if actions are discrete.
      backup: from the outputs of critics for `next_inputs` to targets.

    Returns:
      The parameters of critics in the actor's loss; and a function from parameters to outputs for `inputs`, targets and, with
      batch normalization, what running statistics move towards. Gradients do not flow through targets.
    """
    if not config.batch_norm:
        targets = backup(critics.apply(target, *next_inputs))
        return params, lambda trained: (taken_value(critics, trained, *inputs), targets)

    def predict(trained: Any) -> tuple[Any, Any, Any]:
        both = jax.tree.map(lambda *x: jnp.stack(x), inputs, next_inputs)  # [2, B, ...]: a batch stays split over devices
        outputs, statistics = critics.apply(trained, *both, mutable=["batch_stats"])
        targets = backup(jax.lax.stop_gradient(outputs[:, 1]))
        return outputs[:, 0], targets, statistics["batch_stats"]

    return params | {"batch_stats": target}, predict
