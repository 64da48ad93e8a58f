"""Policies with learning apart from the environments; they exchange data per iteration (Coarse) or per step (Fine)."""

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
    check_codecs,
    described,
    edges,
    on_platform,
    splitting,
    take,
)


@dataclass(frozen=True)
class SingleLearnerCoarse:
    """Actors with their environments on one sub-mesh, the learner on another.

    Once per iteration actors send trajectories and receive parameters: the architecture of Acme and Sebulba, and of IMPALA if
    `staleness` is above 0. With `buffers`, replay buffers have separate devices, as in Ape-X. MSRL's DP-SingleLearnerCoarse.

    Attributes:
      actors: number of devices that act; None for the largest remaining number that divides the number of environments.
      learners: number of devices that learn (data-parallel if more than one).
      staleness: how many iterations the actors' parameters lag behind, as do the priorities of buffers on other devices than
        the learner's; if above 0, acting and sampling overlap learning.
      buffers: number of separate devices for replay buffers; "actors" for the acting devices, which then send only samples;
        None for the learner's devices.
      env_platform: platform of the acting devices, such as "cpu"; None for the platform of the others.
      trajectory_codec: codec for trajectories, such as "bfloat16" or {"state.obs": "frame_stack(4)"}; None for no codec.
      parameter_codec: codec for parameters.
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
        check_codecs(self, "trajectory_codec", "parameter_codec")
        if self.buffers not in (None, "actors") and (
            not isinstance(self.buffers, int) or isinstance(self.buffers, bool) or self.buffers < 1
        ):
            raise ValueError(f"buffers={self.buffers!r} must be a number of devices, 'actors' or None (the learner's)")

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places actors, learners and, if they have separate devices, buffers on disjoint sub-meshes."""
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

    At every step the learner receives observations and sends actions, so parameters never move: SEED RL's architecture. MSRL's
    DP-SingleLearnerFine.

    Attributes:
      envs: number of devices that step environments; None for the largest remaining number that divides the number of
        environments.
      learners: number of devices for inference and learning.
      env_platform: platform of the environments' devices, such as "cpu"; None for the platform of the others.
      observation_codec: codec for observations, such as {"obs": "uint8"} for images; None for no codec.
    """

    envs: int | None = None
    learners: int = 1
    env_platform: str | None = None
    observation_codec: CodecChoice = None

    def __post_init__(self):
        check_codecs(self, "observation_codec")

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
    """The devices of each part; those of the first part may be on another platform."""
    if platform is None:
        return take(devices, {first: num_first, **others}, sizes, policy, axes)
    elsewhere = take(on_platform(platform, devices), {first: num_first}, sizes, policy, axes)
    return elsewhere | take(devices, others, sizes, policy)
