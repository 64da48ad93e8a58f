"""The policies that keep learning apart from the environments: once per iteration (Coarse) or at every step (Fine)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msrl_jax.fragments.placement import check_staleness
from msrl_jax.policies.base import (
    ACTING,
    BUFFERING,
    CodecChoice,
    Device,
    Layout,
    Placement,
    described,
    edges,
    on_platform,
    splitting,
    take,
)


@dataclass(frozen=True)
class SingleLearnerCoarse:
    """Actors with their environments on one sub-mesh, the learner on another.

    Trajectories go up and parameters come down once per iteration: the architecture of Acme and Sebulba, and of IMPALA
    with `staleness` above 0. With `buffers`, replay is sharded apart from the learner: Ape-X. MSRL's DP-SingleLearnerCoarse.

    Attributes:
      actors: how many devices act; None for the most that are left and divide the number of environments.
      learners: how many devices learn (data-parallel if more than one).
      staleness: how many iterations the actors' parameters lag behind, and the priorities of buffers apart from the learner;
        with 1 or more, acting and drawing overlap learning.
      buffers: over how many devices of their own replay buffers are split; "actors" for those that act, which then send
        samples only; None for the learner's.
      env_platform: platform of the acting devices, such as "cpu" beside accelerators; None for the same devices.
      trajectory_codec: packs what goes up, such as "bfloat16" or {"state.obs": "frame_stack(4)"}; None sends it as it is.
      parameter_codec: packs what comes down.
    """

    actors: int | None = None
    learners: int = 1
    staleness: int = 0
    buffers: int | Literal["actors"] | None = None
    env_platform: str | None = None
    trajectory_codec: CodecChoice = None
    parameter_codec: CodecChoice = None

    def __post_init__(self):
        check_staleness(self.staleness)
        if self.buffers not in (None, "actors") and not (isinstance(self.buffers, int) and self.buffers >= 1):
            raise ValueError(f"buffers={self.buffers!r} must be a number of devices, 'actors' or None (the learner's)")

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places actors, learners and, if they have devices of their own, buffers on disjoint sub-meshes."""
        own = {} if self.buffers in (None, "actors") else {"buffers": self.buffers}
        others = {"learners": self.learners, **own}
        buffering = "buffers" if own else "actors" if self.buffers == "actors" else "learners"
        axes = {name: BUFFERING if name == buffering else ACTING for name in ("actors", *others)}
        parts = _parts(devices, "actors", self.actors, others, self.env_platform, sizes, self, axes["actors"])
        placed = {name: Placement.over(name, part, split=splitting(axes[name])) for name, part in parts.items()}
        actors, learners, buffers = placed["actors"], placed["learners"], placed[buffering]
        roles = {"env": actors, "actor": actors, "learner": learners, "server": learners, "buffer": buffers}
        upward = [("actors", "buffers"), ("buffers", "learners")] if own else [("actors", "learners")]
        up = [edge for hop in upward for edge in edges(*hop, up=self.trajectory_codec)]
        codecs = (*up, *edges("actors", "learners", down=self.parameter_codec))
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
      observation_codec: packs what goes up, such as {"obs": "uint8"} for images; None sends it as it is.
    """

    envs: int | None = None
    learners: int = 1
    env_platform: str | None = None
    observation_codec: CodecChoice = None

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places environments apart from the networks."""
        parts = _parts(devices, "envs", self.envs, {"learners": self.learners}, self.env_platform, sizes, self)
        envs = Placement.over("envs", parts["envs"], split=splitting(ACTING))
        learners = Placement.over("learners", parts["learners"])
        roles = {"env": envs, "actor": learners, "learner": learners, "server": learners}
        return Layout(roles, codecs=edges("envs", "learners", up=self.observation_codec), policy=described(self))


def _parts(
    devices: Sequence[Device],
    first: str,
    num_first: int | None,
    others: Mapping[str, int | None],
    platform: str | None,
    sizes: Mapping[str, int],
    policy: object,
    axes: Sequence[str] = ACTING,
) -> dict[str, list[Device]]:
    """The devices of the first part, which may be on a platform of their own, and those of the others."""
    if platform is None:
        return take(devices, {first: num_first, **others}, sizes, policy, axes)
    there = take(on_platform(platform, devices), {first: num_first}, sizes, policy, axes)
    return there | take(devices, others, sizes, policy)
