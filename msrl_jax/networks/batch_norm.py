"""Batch normalization of critics instead of target networks, as in CrossQ (Bhatt et al., 2024, OpenReview PczQtTsTIX).

Normalizes the input of the first dense layer of a critic and the output of every dense layer. One pass computes the values of a
batch and of its next steps, normalized by their joint statistics (Ioffe & Szegedy, 2015, arXiv 1502.03167), so the critics
themselves provide the targets. The actor's loss uses running averages of these statistics, which the learner keeps instead of
target parameters and updates at the rate `tau`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.envs import Discrete, Space
from msrl_jax.networks.network import Network
from msrl_jax.networks.policies import taken_value


def check_batch_norm(config: Any, action_space: Space | None = None) -> None:
    """Raises ValueError if a config sets `batch_norm` but its critics do not support it."""
    whole = getattr(config.network, "is_whole", False)
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
    """Returns means of 0 and variances of 1 for all normalization layers of critics."""
    layers = {name: p for name, p in params["params"]["torso"].items() if name.startswith("BatchNorm")}
    return {"torso": {n: {"mean": jnp.zeros_like(p["bias"]), "var": jnp.ones_like(p["scale"])} for n, p in layers.items()}}


def critics_of_batch(
    config: Any, critics: Network, params: Any, target: Any, inputs: tuple, next_inputs: tuple, backup: Callable[[Any], Any]
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """Prepares the critics for an update, with or without batch normalization.

    Args:
      config: a config with the field `batch_norm`.
      critics: the critics.
      params: their parameters.
      target: the parameters of the target critics; with batch normalization, the running statistics.
      inputs: observations and actions.
      next_inputs: the next observations and the policy's actions there; only observations if actions are discrete.
      backup: maps the outputs of critics for `next_inputs` to targets.

    Returns:
      The parameters of the critics for the actor's loss; and a function from parameters to outputs for `inputs`, targets and,
      with batch normalization, the new statistics. Gradients do not flow through targets.
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
