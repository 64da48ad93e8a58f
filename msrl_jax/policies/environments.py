"""Environments: devices of their own for environments, the agents' networks on others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl_jax.policies.base import ACTING, BUFFERING, Device, Layout, Placement, described, on_platform, splitting, take


@dataclass(frozen=True)
class Environments:
    """Environments on dedicated devices; the agents' networks are split over the "agent" axis of another sub-mesh.

    For many agents, or environments that are heavy themselves: MALib's setting, and MSRL's DP-Environments. Arrays without
    an "agent" dimension are split along "env" on the agents' devices too, so a single agent trains data-parallel there.

    Attributes:
      envs: how many devices step environments; None for half of them, or fewer so that they divide their number.
      agents: how many devices hold agents; None for the most of the rest that divide the number of agents (of
        environments, if there is no "agent" axis).
      env_platform: platform of the environments' devices, such as "cpu" beside accelerators; None for the same devices.
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
