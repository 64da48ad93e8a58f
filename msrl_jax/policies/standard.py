"""The distribution policies, and how to get one by name."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msrl_jax.fragments.placement import Device, DistributionPolicy, Layout, Placement, check_staleness
from msrl_jax.fragments.support import checks, naming
from msrl_jax.fragments.support.checks import shown, suggestion
from msrl_jax.fragments.support.text_values import parse_spec
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.policies.helpers import (
    ACTING,
    BUFFERING,
    CodecChoice,
    axes_to_split,
    check_codecs,
    check_counts,
    divide_devices,
    edges,
    on_platform,
    policy_repr,
)


@entry
@dataclass(frozen=True)
class GPUOnly:
    """Everything on one mesh; environments are split over it, and gradients are all-reduced inside the program.

    The architecture of Anakin, WarpDrive and PureJaxRL (which uses one device). MSRL's DP-GPUOnly.

    Attributes:
      num_devices: number of devices; None for the largest number that divides the number of environments, or of
        population members.
    """

    num_devices: int | None = None

    def __post_init__(self):
        check_counts(self, "num_devices")

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places all roles on one mesh."""
        (mesh_devices,) = divide_devices(devices, {"num_devices": self.num_devices}, sizes, self, BUFFERING).values()
        all_devices = Placement.over("all", mesh_devices)
        return Layout(dict.fromkeys(("env", "actor", "learner", "server"), all_devices), policy=policy_repr(self))


@entry
@dataclass(frozen=True)
class MultiLearner:
    """An acting program and a learning program on every device; only gradients are exchanged, as an all-reduce.

    The architecture of DD-PPO and of RLlib's multi-GPU learners. MSRL's DP-MultiLearner.

    Attributes:
      num_devices: number of devices; None for the largest number that divides the number of environments, or of
        population members.
    """

    num_devices: int | None = None

    def __post_init__(self):
        check_counts(self, "num_devices")

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places actors and learners side by side on one mesh."""
        (mesh_devices,) = divide_devices(devices, {"num_devices": self.num_devices}, sizes, self, BUFFERING).values()
        actors, learners = Placement.over("actors", mesh_devices), Placement.over("learners", mesh_devices)
        roles = {"env": actors, "actor": actors, "learner": learners, "server": learners}
        return Layout(roles, policy=policy_repr(self))


@entry
@dataclass(frozen=True)
class SingleLearnerCoarse:
    """Actors with their environments on one sub-mesh, the learner on another.

    Once per iteration, actors send trajectories and receive parameters: the architecture of Acme and Sebulba, and of IMPALA if
    `staleness` is above 0. With `buffers`, replay buffers have separate devices, as in Ape-X. MSRL's DP-SingleLearnerCoarse.

    Attributes:
      actors: number of devices that act; None for the largest remaining number that divides the number of environments.
      learners: number of devices that learn (data-parallel if more than one).
      staleness: number of iterations by which the actors' parameters lag behind, as do the priorities of buffers on devices
        other than the learner's; if above 0, acting and sampling overlap learning.
      buffers: number of separate devices for replay buffers; "actors" for the acting devices, which then send only samples;
        None for the learner's devices.
      env_platform: platform of the acting devices, such as "cpu"; None for the same platform as the others.
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
        check_counts(self, "actors", "learners")
        check_codecs(self, "trajectory_codec", "parameter_codec")
        if self.buffers not in (None, "actors") and (
            not isinstance(self.buffers, int) or isinstance(self.buffers, bool) or self.buffers < 1
        ):
            raise ValueError(f"buffers={self.buffers!r} must be a number of devices, 'actors' or None (the learner's)")

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places actors, learners and, if they have separate devices, buffers on disjoint sub-meshes."""
        buffer_count = {} if self.buffers in (None, "actors") else {"buffers": self.buffers}
        other_counts = {"learners": self.learners, **buffer_count}
        buffering = "buffers" if buffer_count else "actors" if self.buffers == "actors" else "learners"
        axes = {name: BUFFERING if name == buffering else ACTING for name in ("actors", *other_counts)}
        parts = _divide(devices, "actors", self.actors, other_counts, self.env_platform, sizes, self, axes["actors"])
        placed = {name: Placement.over(name, part, split=axes_to_split(axes[name])) for name, part in parts.items()}
        actors, learners, buffers = placed["actors"], placed["learners"], placed[buffering]
        roles = {"env": actors, "actor": actors, "learner": learners, "server": learners, "buffer": buffers}
        hops = [("actors", "buffers"), ("buffers", "learners")] if buffer_count else [("actors", "learners")]
        trajectory_edges = [edge for hop in hops for edge in edges(*hop, up=self.trajectory_codec)]
        codecs = (*trajectory_edges, *edges("actors", "learners", down=self.parameter_codec))
        return Layout(roles, self.staleness, codecs, policy=policy_repr(self))


@entry
@dataclass(frozen=True)
class SingleLearnerFine:
    """Environments on one sub-mesh; inference and learning on another.

    At every step, the learner receives observations and sends actions, so parameters never move: SEED RL's architecture. MSRL's
    DP-SingleLearnerFine.

    Attributes:
      envs: number of devices that step environments; None for the largest remaining number that divides the number of
        environments.
      learners: number of devices for inference and learning.
      env_platform: platform of the environments' devices, such as "cpu"; None for the same platform as the others.
      observation_codec: codec for observations, such as {"obs": "uint8"} for images; None for no codec.
    """

    envs: int | None = None
    learners: int = 1
    env_platform: str | None = None
    observation_codec: CodecChoice = None

    def __post_init__(self):
        check_counts(self, "envs", "learners")
        check_codecs(self, "observation_codec")

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places environments apart from the networks."""
        parts = _divide(devices, "envs", self.envs, {"learners": self.learners}, self.env_platform, sizes, self)
        envs = Placement.over("envs", parts["envs"], split=axes_to_split(ACTING))
        learners = Placement.over("learners", parts["learners"])
        roles = {"env": envs, "actor": learners, "learner": learners, "server": learners}
        return Layout(roles, codecs=edges("envs", "learners", up=self.observation_codec), policy=policy_repr(self))


@entry
@dataclass(frozen=True)
class Environments:
    """Environments on their own devices; the agents' networks on another sub-mesh, split along the "agent" axis.

    For many agents or expensive environments, as in MALib. MSRL's DP-Environments. The agents' devices split arrays without an
    "agent" dimension along "env", so a single agent is trained data-parallel.

    Attributes:
      envs: number of devices that step environments; None for the largest number, up to half of the devices, that divides
        the number of environments.
      agents: number of devices that hold agents; None for the largest remaining number that divides the number of agents
        (of environments if there is no "agent" axis).
      env_platform: platform of the environments' devices, such as "cpu"; None for the same platform as the others.
    """

    envs: int | None = None
    agents: int | None = None
    env_platform: str | None = None

    def __post_init__(self):
        check_counts(self, "envs", "agents")

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places environments on one sub-mesh and agents on another."""
        agent_count = {"agents": self.agents}
        axes = ("agent",) if "agent" in sizes else BUFFERING
        if self.env_platform is not None:
            envs = divide_devices(on_platform(self.env_platform, devices), {"envs": self.envs}, sizes, self)["envs"]
            agents = divide_devices(devices, agent_count, sizes, self, axes)["agents"]
        elif len(devices) == 1:
            envs, agents = divide_devices(devices, {"envs": self.envs, "agents": self.agents or 1}, sizes, self).values()
        else:
            half = len(devices) - self.agents if self.agents else max(1, len(devices) // 2)
            envs = divide_devices(devices if self.envs else devices[:half], {"envs": self.envs}, sizes, self)["envs"]
            agents = divide_devices(devices[len(envs) :], agent_count, sizes, self, axes)["agents"]
        env_mesh = Placement.over("envs", envs, split=axes_to_split(ACTING))
        agent_mesh = Placement.over("agents", agents, split=("agent", *BUFFERING, "member"))
        roles = {"env": env_mesh, "actor": agent_mesh, "learner": agent_mesh, "server": agent_mesh}
        return Layout(roles, policy=policy_repr(self))


@entry
@dataclass(frozen=True)
class Central:
    """Workers act and compute gradients; a server keeps the parameters and applies the gradients.

    For every minibatch, the server receives gradients and sends parameters: a parameter server. MSRL's DP-Central.

    Attributes:
      workers: number of devices that act and compute gradients; None for the largest remaining number that divides the
        number of environments.
      shards: number of devices of the server; each holds one part of every large tensor.
      gradient_codec: codec for gradients, such as "bfloat16"; None for no codec.
      parameter_codec: codec for parameters.
    """

    workers: int | None = None
    shards: int = 1
    gradient_codec: CodecChoice = None
    parameter_codec: CodecChoice = None

    def __post_init__(self):
        check_counts(self, "workers", "shards")
        check_codecs(self, "gradient_codec", "parameter_codec")

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places the server on separate devices."""
        parts = divide_devices(devices, {"workers": self.workers, "shards": self.shards}, sizes, self, BUFFERING)
        workers = Placement.over("workers", parts["workers"])
        server = Placement.over("server", parts["shards"], split=(), scatter=True)
        roles = {"env": workers, "actor": workers, "learner": workers, "server": server}
        codecs = edges("workers", "server", up=self.gradient_codec, down=self.parameter_codec)
        return Layout(roles, codecs=codecs, policy=policy_repr(self))


def _divide(
    devices: Sequence[Device],
    first: str,
    num_first: int | None,
    other_counts: Mapping[str, int | None],
    platform: str | None,
    sizes: Mapping[str, int],
    policy: object,
    axes: Sequence[str] = ACTING,
) -> dict[str, list[Device]]:
    """Returns the devices of each part; those of the first part may be on another platform."""
    if platform is None:
        return divide_devices(devices, {first: num_first, **other_counts}, sizes, policy, axes)
    first_devices = divide_devices(on_platform(platform, devices), {first: num_first}, sizes, policy, axes)
    return first_devices | divide_devices(devices, other_counts, sizes, policy)


_ALL = (GPUOnly, MultiLearner, SingleLearnerCoarse, SingleLearnerFine, Environments, Central)

POLICIES: dict[str, type] = {policy.__name__: policy for policy in _ALL}


@entry
def register(policy: type) -> type:
    """Adds a distribution policy to the registry, so that `get` finds it by the name of its class.

    Args:
      policy: a dataclass with a method `layout(devices, sizes)`.

    Returns:
      The same class.

    Raises:
      ValueError: if another policy has that name, or it is "auto".
    """
    if policy.__name__.lower() == "auto":
        raise ValueError("a policy cannot be named 'auto', which makes train choose one; use another name")
    return checks.add("policy", POLICIES, policy.__name__, policy)


def is_custom(policy: str) -> bool:
    """Whether a string names a custom policy in a module, which `get` imports."""
    first, colon, _ = parse_spec(policy, prefixes=True)[0].partition(":")
    return bool(colon) and first.lower() not in map(str.lower, POLICIES)


def _is_policy(value: object) -> bool:
    return isinstance(value, type) and callable(getattr(value, "layout", None))


def names() -> list[str]:
    """Returns the names of all distribution policies."""
    return sorted(POLICIES)


@entry
def get(policy: str | DistributionPolicy, **parameters: Any) -> DistributionPolicy:
    """Looks up a distribution policy.

    Args:
      policy: a name in `POLICIES` (case is ignored), or `MODULE:CLASS` of a custom policy, whose module is also looked up in
        the working directory, optionally followed by `:key=value,...`; or a policy, which is returned unchanged.
      **parameters: the policy's parameters, such as `learners=2`.

    Returns:
      The policy.

    Raises:
      ValueError: if the policy or a parameter is unknown; suggests the nearest.
      TypeError: if `policy` is neither a name nor a policy, or parameters are given for a policy object.
    """
    if not isinstance(policy, str):
        if not isinstance(policy, DistributionPolicy) or isinstance(policy, type):
            call = f"make one, {getattr(policy, '__name__', '')}()"
            remedy = call if isinstance(policy, type) else "it needs a method layout(devices, sizes)"
            raise TypeError(f"{shown(policy)} is not a distribution policy: {remedy}")
        if parameters:
            raise TypeError(f"{shown(policy)} is already a policy; set {sorted(parameters)} when you create it")
        return policy
    if policy.lower().partition(":")[0] == "auto":
        raise ValueError(
            f"policy {policy!r}: 'auto' is for train, and for explain without --devices, and has no parameters; here, use one "
            f"of {', '.join(names())}"
        )
    name, spec_parameters = parse_spec(policy, prefixes=True)
    parameters = spec_parameters | parameters
    first, colon, suffix = name.partition(":")
    naming.check_no_file("policy", name)
    if colon and not is_custom(name):
        raise ValueError(f"cannot read {suffix!r} in {policy!r}; write {first}:key=value,key=value")
    if colon:
        cls: Any = naming.imported("policy", name, "a class with a method layout(devices, sizes)", _is_policy)
    else:
        cls = checks.find("policy", POLICIES, name)
    fields = list(inspect.signature(cls).parameters)
    for name in parameters:
        if name not in fields:
            owners = [n for n, other in POLICIES.items() if name in inspect.signature(other).parameters]
            hint = f" (a parameter of {' and '.join(owners)})" if owners else suggestion(name, fields)
            raise ValueError(f"{cls.__name__} has no parameter {name!r}{hint}; its parameters are {', '.join(fields)}")
    return get(cls(**parameters))
