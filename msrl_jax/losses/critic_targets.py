"""Which critics value the next steps: target networks here."""

from typing import Any, Protocol

from msrl_jax.configs.options import option
from msrl_jax.envs import Space
from msrl_jax.networks.network import Network
from msrl_jax.networks.torso import Torso


class CriticTargets(Protocol):
    """The options for which critics value the next steps."""

    def torso(self, torso: Torso, action_space: Space) -> Torso:
        """Returns the torso of the critics."""
        ...

    def initial(self, params: Any) -> Any:
        """Returns the target parameters at the start."""
        ...

    def values(
        self, critics: Network, params: Any, target_params: Any, inputs: tuple[Any, Any], next_inputs: tuple[Any, Any]
    ) -> tuple[Any, Any, Any]:
        """Returns the values of a batch and of the next steps, and statistics of the batch, if there are any.

        Args:
          critics: the critics.
          params: the trained parameters.
          target_params: the target parameters; no gradients flow through values of the next steps.
          inputs: observations and actions.
          next_inputs: the next observations, and the policy's actions there.
        """
        ...

    def followed(self, params: Any, statistics: Any) -> Any:
        """Returns what the target parameters follow, given updated parameters and the statistics that `values` returned."""
        ...

    def for_actor(self, params: Any, target_params: Any) -> Any:
        """Returns the parameters of the critics in the actor's loss."""
        ...


@option(of=CriticTargets)
class TargetNetworks:
    """Copies of the critics, which follow them slowly."""

    def torso(self, torso: Torso, action_space: Space) -> Torso:
        """Returns the torso as it is."""
        return torso

    def initial(self, params: Any) -> Any:
        """Returns a copy of the parameters."""
        return params

    def values(
        self, critics: Network, params: Any, target_params: Any, inputs: tuple[Any, Any], next_inputs: tuple[Any, Any]
    ) -> tuple[Any, Any, Any]:
        """Returns the values of a batch, and those of the target networks for the next steps."""
        next_values = critics.apply(target_params, *next_inputs)
        return critics.apply(params, *inputs), next_values, None

    def followed(self, params: Any, statistics: Any) -> Any:
        """Returns the parameters."""
        return params

    def for_actor(self, params: Any, target_params: Any) -> Any:
        """Returns the trained parameters."""
        return params
