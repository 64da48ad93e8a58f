"""Environments: separate devices for environments and for the agents' networks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl_jax.policies.base import ACTING, BUFFERING, Device, Layout, Placement, described, on_platform, splitting, take


@dataclass(frozen=True)
class Environments:
    """Environments on their own devices; the agents' networks on another sub-mesh, split along the "agent" axis.

    For many agents or expensive environments, as in MALib. MSRL's DP-Environments. The agents' devices split arrays without an
    "agent" dimension along "env", so a single agent trains data-parallel.

    Attributes:
      envs: number of devices that step environments; None for the largest number, up to half of the devices, that divides
        the number of environments.
      agents: number of devices that hold agents; None for the largest remaining number that divides the number of agents
        (of environments if there is no "agent" axis).
      env_platform: platform of the environments' devices, such as "cpu"; None for the platform of the others.
    """

    envs: int | None = None
    agents: int | None = None
    env_platform: str | None = None

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places environments on one sub-mesh and agents on another."""
        wanted = {"agents": self.agents}
        axes = ("agent",) if "agent" in sizes else BUFFERING
        if self.env_platform is not None:
            envs = take(on_platform(self.env_platform, devices), {"envs": self.envs}, sizes, self)["envs"]
            agents = take(devices, wanted, sizes, self, axes)["agents"]
        elif len(devices) == 1:
            envs, agents = take(devices, {"envs": self.envs, "agents": self.agents or 1}, sizes, self).values()
        else:
            half = len(devices) - self.agents if self.agents else max(1, len(devices) // 2)
            envs = take(devices if self.envs else devices[:half], {"envs": self.envs}, sizes, self)["envs"]
            agents = take(devices[len(envs) :], wanted, sizes, self, axes)["agents"]
        env_mesh = Placement.over("envs", envs, split=splitting(ACTING))
        agent_mesh = Placement.over("agents", agents, split=("agent", *BUFFERING, "member"))
        roles = {"env": env_mesh, "actor": agent_mesh, "learner": agent_mesh, "server": agent_mesh}
        return Layout(roles, policy=described(self))
