"""The policies that keep learning apart from the environments: once per iteration (Coarse) or at every step (Fine)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl_jax.fragments.codec import Codec
from msrl_jax.policies.base import Device, Layout, Placement, described, edges, on_platform, take


@dataclass(frozen=True)
class SingleLearnerCoarse:
    """Actors with their environments on one sub-mesh, the learner on another.

    Trajectories go up and parameters come down once per iteration: the architecture of Acme and Sebulba, and of IMPALA
    with `staleness` above 0. MSRL's DP-SingleLearnerCoarse.

    Attributes:
      actors: how many devices act; None for the most that are left and divide the number of environments.
      learners: how many devices learn (data-parallel if more than one).
      staleness: how many iterations the actors' parameters lag behind; with 1 or more, acting overlaps learning.
      env_platform: platform of the acting devices, such as "cpu" beside accelerators; None for the same devices.
      trajectory_codec: packs what goes up, such as "bfloat16"; None sends it as it is.
      parameter_codec: packs what comes down.
    """

    actors: int | None = None
    learners: int = 1
    staleness: int = 0
    env_platform: str | None = None
    trajectory_codec: str | Codec | None = None
    parameter_codec: str | Codec | None = None

    def __post_init__(self):
        if not isinstance(self.staleness, int) or self.staleness < 0:
            raise ValueError(f"staleness={self.staleness!r} must be an integer of at least 0 (iterations)")

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places actors and learners on disjoint sub-meshes."""
        parts = _parts(devices, "actors", self.actors, "learners", self.learners, self.env_platform, sizes, self)
        actors, learners = Placement.over("actors", parts["actors"]), Placement.over("learners", parts["learners"])
        roles = {"env": actors, "actor": actors, "learner": learners, "server": learners}
        codecs = edges("actors", "learners", up=self.trajectory_codec, down=self.parameter_codec)
        return Layout(roles, self.staleness, codecs, policy=described(self))


@dataclass(frozen=True)
class SingleLearnerFine:
    """Environments on one sub-mesh; inference and learning on another.

    Observations go up and actions come down at every step, so parameters never move: SEED RL's architecture. MSRL's
    DP-SingleLearnerFine.

    Attributes:
      envs: how many devices step environments; None for the most that are left and divide their number.
      learners: how many devices infer and learn.
      env_platform: platform of the environments' devices, such as "cpu" beside accelerators; None for the same devices.
      observation_codec: packs what goes up, such as "uint8" for images; None sends it as it is.
    """

    envs: int | None = None
    learners: int = 1
    env_platform: str | None = None
    observation_codec: str | Codec | None = None

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places environments apart from the networks."""
        parts = _parts(devices, "envs", self.envs, "learners", self.learners, self.env_platform, sizes, self)
        envs, learners = Placement.over("envs", parts["envs"]), Placement.over("learners", parts["learners"])
        roles = {"env": envs, "actor": learners, "learner": learners, "server": learners}
        return Layout(roles, codecs=edges("envs", "learners", up=self.observation_codec), policy=described(self))


def _parts(
    devices: Sequence[Device],
    first: str,
    num_first: int | None,
    second: str,
    num_second: int,
    platform: str | None,
    sizes: Mapping[str, int],
    policy: object,
) -> dict[str, list[Device]]:
    if platform is None:
        return take(devices, {first: num_first, second: num_second}, sizes, policy)
    there = take(on_platform(platform, devices), {first: num_first}, sizes, policy)
    return there | take(devices, {second: num_second}, sizes, policy)
