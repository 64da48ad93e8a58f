"""Batch normalization of critics instead of target networks: CrossQ (Bhatt et al., 2024, OpenReview PczQtTsTIX).

Normalizes the input of the first dense layer of a critic and the output of every dense layer. One pass computes the values of a
batch and of its next steps, normalized by their joint statistics (Ioffe & Szegedy, 2015, arXiv 1502.03167), so the critics
themselves provide the targets. The actor's loss uses running averages of these statistics, which the learner keeps instead of
target parameters and updates at the rate `tau`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.configs.options import option
from msrl_jax.envs import Discrete, Space
from msrl_jax.fragments.support.checks import name_of
from msrl_jax.losses.critic_targets import CriticTargets
from msrl_jax.networks.network import Network
from msrl_jax.networks.torso import Torso

_FACT = "normalizes dense layers of critics that see observations and actions"


@option(of=CriticTargets)
class CrossQ:
    """No target networks: critics normalize batches (Bhatt et al., 2024, OpenReview PczQtTsTIX)."""

    def check_config(self, config: Any) -> None:
        """Raises ValueError if the critics learn from windows of steps."""
        if config.core is not None:
            place = f"{type(config).__name__}.target={str(self)!r}"
            raise ValueError(f"{place} {_FACT}, but core={name_of(config.core)} learns from windows of steps; use core=None")

    def torso(self, torso: Torso, action_space: Space) -> Torso:
        """Returns a torso with normalization; raises ValueError if it or the actions do not support it."""
        if isinstance(action_space, Discrete):
            raise ValueError(f"target={str(self)!r} {_FACT}, but those of discrete actions see none; use layer_norm=True")
        if torso.is_whole or torso.kind == "simba":
            network = "CustomNetworks(...)" if torso.is_whole else "'simba'"
            raise ValueError(f"target={str(self)!r} {_FACT}, but network={network} has other layers; use 'mlp'")
        return torso.clone(normalize=_normalize)

    def initial(self, params: Any) -> Any:
        """Returns means of 0 and variances of 1 for all normalization layers of critics."""
        layers = {name: p for name, p in params["params"]["torso"].items() if name.startswith("BatchNorm")}
        return {"torso": {n: {"mean": jnp.zeros_like(p["bias"]), "var": jnp.ones_like(p["scale"])} for n, p in layers.items()}}

    def values(
        self, critics: Network, params: Any, target_params: Any, inputs: tuple[Any, Any], next_inputs: tuple[Any, Any]
    ) -> tuple[Any, Any, Any]:
        """Returns the values of a batch and of the next steps from one pass, and the new statistics."""
        stacked = jax.tree.map(lambda *x: jnp.stack(x), inputs, next_inputs)  # [2, B, ...]: a batch stays split over devices
        outputs, statistics = critics.apply(params, *stacked, mutable=["batch_stats"])
        return outputs[:, 0], jax.lax.stop_gradient(outputs[:, 1]), statistics["batch_stats"]

    def followed(self, params: Any, statistics: Any) -> Any:
        """Returns the statistics."""
        return statistics

    def for_actor(self, params: Any, target_params: Any) -> Any:
        """Returns the parameters with the running statistics."""
        return params | {"batch_stats": target_params}


def _normalize(x: jax.Array) -> jax.Array:
    """Normalizes by the batch's statistics if the caller makes `batch_stats` mutable, else by the given statistics."""
    norm = nn.BatchNorm(momentum=0.0, epsilon=1e-3, use_fast_variance=False)
    return norm(x, use_running_average=not norm.is_mutable_collection("batch_stats"))
