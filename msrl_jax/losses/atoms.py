"""Predictions of a return's distribution as probabilities of atoms (C51; Bellemare et al., 2017, arXiv 1707.06887).

In the shape descriptions, `B` denotes the batch size, `C` the number of critics and `N` the number of atoms.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from msrl_jax.configs.config import TunableOrNone, field, tunable
from msrl_jax.configs.options import option
from msrl_jax.losses.predictions import ActionPrediction, ActionReturns, Backup, CriticPrediction, CriticReturns


@option(of=(ActionReturns, CriticReturns))
class C51:
    """Predicts probabilities of atoms (Bellemare et al., 2017, arXiv 1707.06887)."""

    v_min: TunableOrNone = tunable(default=None, doc="lowest atom; None: `-1 / (1 - discount)`. Usual: lowest return.")
    v_max: TunableOrNone = tunable(default=None, doc="highest atom; None: `1 / (1 - discount)`. Usual: highest return.")
    num_atoms: int = field(default=51, low=2, doc="number of atoms, `N`. Usual: 51 to 251.")

    def support(self, discount: float) -> tuple[float, float]:
        """Returns the lowest and the highest atom."""
        v_min = -1 / (1 - discount) if self.v_min is None else self.v_min
        return v_min, 1 / (1 - discount) if self.v_max is None else self.v_max

    def check_config(self, config: Any) -> None:
        """Raises ValueError unless the atoms have finite limits in the right order."""
        name = type(config).__name__
        if (self.v_min is None or self.v_max is None) and config.discount == 1:
            raise ValueError(
                f"{name}.discount=1.0 bounds no return; give v_min and v_max to returns='c51', or use discount=0.99"
            )
        v_min, v_max = self.support(config.discount)
        if v_min >= v_max:
            raise ValueError(f"{name}.returns: v_min={v_min:g} is not below v_max={v_max:g}; exchange them, or give others")

    def of_actions(self, discount: float) -> ActionPrediction:
        """Returns the functions of a network's logits per action; the TD error is the loss."""
        v_min, v_max = self.support(discount)

        def loss(
            outputs: jax.Array, next_outputs: jax.Array, reward: jax.Array, discount: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            returns = reward + discount * self._atoms(v_min, v_max)
            masses = categorical_projection(jax.nn.softmax(next_outputs), returns, v_min, v_max)
            divergence = categorical_loss(outputs, masses)
            return divergence, divergence

        return ActionPrediction(self.num_atoms, lambda outputs: jax.nn.softmax(outputs) @ self._atoms(v_min, v_max), loss)

    def of_critics(self, discount: float) -> CriticPrediction:
        """Returns the functions of critics' logits; uses the critic with the lowest mean, per example (FastTD3, 2505.22642)."""
        v_min, v_max = self.support(discount)

        def expected(logits: jax.Array) -> jax.Array:
            return jax.nn.softmax(logits) @ self._atoms(v_min, v_max)

        def target(logits: jax.Array, backup: Backup) -> jax.Array:
            lowest = expected(logits).argmin(0)
            probability = jax.nn.softmax(jnp.take_along_axis(logits, lowest[None, :, None], 0)[0])
            atoms = jnp.broadcast_to(self._atoms(v_min, v_max)[:, None], (self.num_atoms, len(probability)))
            returns = jax.vmap(backup, out_axes=1)(atoms)
            return jax.vmap(categorical_projection, (0, 0, None, None))(probability, returns, v_min, v_max)

        def loss(logits: jax.Array, target: jax.Array) -> jax.Array:
            return jax.vmap(jax.vmap(categorical_loss), (0, None))(logits, target)

        return CriticPrediction(
            num_outputs=self.num_atoms,
            expected=expected,
            value=lambda logits: expected(logits).min(0),
            target=target,
            loss=loss,
            error=lambda logits, target: loss(logits, target).mean(0),
        )

    def _atoms(self, v_min: float, v_max: float) -> jax.Array:
        return jnp.linspace(v_min, v_max, self.num_atoms, dtype=jnp.float32)


def categorical_projection(probability: jax.Array, returns: jax.Array, v_min: float, v_max: float) -> jax.Array:
    """Projects masses `[N]` at `returns` `[N]` onto `N` atoms from `v_min` to `v_max` (arXiv 1707.06887)."""
    chex.assert_rank(probability, 1)
    chex.assert_equal_shape((probability, returns))
    num_atoms = probability.shape[-1]
    spacing = (v_max - v_min) / (num_atoms - 1)
    position = (jnp.clip(returns, v_min, v_max) - v_min) / spacing
    share = jnp.clip(1 - jnp.abs(position[:, None] - jnp.arange(num_atoms)), 0, 1)
    return probability @ share


def categorical_loss(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Returns the KL divergence of the masses of logits `[N]` from the target; its gradient is that of the cross-entropy."""
    chex.assert_rank(logits, 1)
    chex.assert_equal_shape((logits, target))
    negative_entropy = jnp.where(target > 0, target * jnp.log(jnp.where(target > 0, target, 1.0)), 0.0)
    return (negative_entropy - target * jax.nn.log_softmax(logits)).sum(-1)
