"""Helpers of algorithms that search with mctx: importing it, checking the memory of its trees, and the policy loss."""

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.agents.agent import RolloutFields
from msrl_jax.fragments.runtime.memory import device_memory, own_devices


def import_mctx(name: str) -> Any:
    """Imports mctx; raises ImportError, with the name of the algorithm, if it is not installed."""
    try:
        return importlib.import_module("mctx")
    except ImportError as error:
        raise ImportError(
            f"{name} searches with mctx, which is not installed; install it with: pip install 'msrl-jax[search]'"
        ) from error


def check_trees(config: RolloutFields, num_actions: int, state_bytes: int, simulations: str = "num_simulations") -> None:
    """Raises ValueError if all search trees together exceed the memory of the devices that they are split over.

    A node of a tree contains a state of `state_bytes`; `simulations` is the name of the config field with their number.
    """
    # mctx keeps five numbers per node and six per action of a node, in addition to the state.
    node = 4 * (5 + 6 * num_actions) + state_bytes
    number = getattr(config, simulations)
    nbytes = config.num_envs * (number + 1) * node
    local = own_devices()
    devices = local[: math.gcd(config.num_envs, len(local))]
    limit = device_memory(devices)
    if limit is not None and nbytes > limit:
        max_simulations = limit // (config.num_envs * node) - 1
        remedy = f"{simulations}={max_simulations} or less, or fewer num_envs" if max_simulations > 0 else "fewer num_envs"
        raise ValueError(
            f"{type(config).__name__}.{simulations}={number}: the search trees of "
            f"num_envs={config.num_envs} environments take {nbytes:,} bytes, but the {len(devices)} {devices[0].platform} "
            f"devices that they can be split over have {limit:,}; use {remedy}"
        )


def cross_entropy(target: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns the cross-entropy of target probabilities and policies with logits `[..., A]`, -inf for illegal actions.
    `[...]`
    """
    log_prob = jnp.where(target > 0, jax.nn.log_softmax(logits), 0.0)
    return -(target * log_prob).sum(-1)
