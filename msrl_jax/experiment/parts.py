"""What the learner of a run and its actors agree on: the halves of an iteration as programs, keys, and how parameters cross."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax import codecs
from msrl_jax._checks import shown
from msrl_jax.codecs import BFLOAT16, Codec
from msrl_jax.envs.base import is_on_host
from msrl_jax.experiment.spec import Experiment
from msrl_jax.fragments.runtime.executables import lower
from msrl_jax.fragments.runtime.halves import Apart, Halves, halves


@dataclass(frozen=True, eq=False)
class Parts:
    """The halves of an experiment's iteration, compiled for one device of this process."""

    experiment: Experiment
    halves: Halves
    metrics: Any  # the structure of the metrics of an iteration
    device: Any

    @functools.cached_property
    def state(self) -> Any:
        """Shapes and dtypes of the state of the run."""
        return jax.eval_shape(self.experiment.initial_state)

    @functools.cached_property
    def at(self) -> jax.sharding.Sharding:
        """Where everything is."""
        return jax.sharding.SingleDeviceSharding(self.device)

    def _placed(self, kinds: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.at) for x in kinds]

    @functools.cached_property
    def learn(self) -> Any:
        """`(leaves of the state, what was sent) -> (next leaves, metrics)`; it takes the memory of the leaves."""
        leaves, sent = self._placed(jax.tree.leaves(self.state)), self._placed(self.halves.sent_kinds)
        return lower(jax.jit(self.halves.learn, donate_argnums=0), leaves, sent).compile()

    @functools.cached_property
    def act(self) -> Any:
        """`(leaves of an actor, what was published) -> (its next leaves, what it sends)`."""
        own = jax.tree.leaves(self.state)
        private = self._placed([own[i] for i in self.halves.private])
        return lower(jax.jit(self.halves.act), private, self._placed(self.halves.published_kinds)).compile()

    def first(self, ticket: int) -> list[jax.Array]:
        """The leaves with which an actor begins: those of the run itself for ticket 0, of another key for each other one."""
        # `split` makes keys as `fold_in` does, from small numbers.
        key = self.experiment.key if ticket == 0 else jax.random.fold_in(self.experiment.key, np.uint32(2**32 - ticket))
        leaves = jax.tree.leaves(jax.jit(self.experiment.agent.init, out_shardings=self.at)(key))
        return [leaves[i] for i in self.halves.private]


def parts_of(experiment: Experiment, device: Any = None) -> Parts:
    """The parts of an experiment; raises ValueError, with what to do, if actors of other processes cannot act for it."""

    def refused(why: str, remedy: str) -> ValueError:
        what = f"{experiment.name} on {experiment.env_name} cannot learn from actors in other processes"
        return ValueError(f"{what}: {why}. Leave out actors_at{remedy}")

    if jax.process_count() > 1:
        raise refused(f"its learner would be {jax.process_count()} processes", ", or start the learner as one process")
    if experiment.has_members:
        why = f"it has {experiment.members} members, whose data would be of several policies"
        raise refused(why, ", or train one seed with one value of each setting")
    if is_on_host(experiment.environment):
        raise refused("the host simulates its environments", ", or use an environment that is written in JAX")
    if experiment.env_params is not None:
        why = "env_params are kept in its state, which actors do not read"
        raise refused(why, ", or fix them in the name of the environment")
    if (agent := experiment.behavior.agent).unit != "environment steps":
        raise refused("it learns from data alone", "; no actors are needed")
    env_state = getattr(jax.eval_shape(agent.init, jax.random.key(0)), "env_state", ())
    if env_state and jax.tree.leaves(jax.eval_shape(agent.env.statistics, env_state)):
        why = "each actor would normalize by statistics of its own"
        raise refused(why, ", or normalize_observations and normalize_rewards")

    def loop_refused(why: str) -> ValueError:
        takes = experiment.name in ("impala", "ppo", "a2c")  # but not with all settings, such as replay_batches
        return refused(why, f", or train {experiment.name} with its defaults" if takes else ", or train impala, ppo or a2c")

    device = jax.local_devices()[0] if device is None else device
    program = experiment.compile(Apart(device), [device])
    return Parts(experiment, halves(program.schedule, loop_refused), program.traced.metrics, device)


@dataclass(frozen=True, eq=False)
class Packing:
    """How what is published crosses: as it is, in bfloat16, or as what changed of that since the last message to an actor."""

    codec: Codec | None
    kinds: Sequence[Any]  # of what is published

    @classmethod
    def of(cls, codec: Any, kinds: Sequence[Any]) -> "Packing":
        """The packing of a codec by its name; raises ValueError if it is for other values than parameters."""
        known = None if codec is None else codecs.get(codec) if isinstance(codec, str | Codec) else codec
        if known is not None and not (isinstance(known, Codec) and known.encode is BFLOAT16.encode):
            raise ValueError(f"parameter_codec={shown(codec)}: actors in other processes take 'bfloat16', 'delta' or none")
        return cls(known, kinds)

    @property
    def name(self) -> str | None:
        """The name of the codec."""
        return None if self.codec is None else self.codec.name

    @functools.cached_property
    def packs(self) -> tuple[bool, ...]:
        """Which arrays are packed."""
        return tuple(self.codec is not None and self.codec.takes(x) for x in self.kinds)

    @functools.cached_property
    def packed_kinds(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes as they cross."""
        pairs = zip(self.kinds, self.packs, strict=True)
        return [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if packs else x.dtype) for x, packs in pairs]

    def pack(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The arrays as they cross."""
        return [np.asarray(x).astype(kind.dtype) for x, kind in zip(arrays, self.packed_kinds, strict=True)]

    def unpack(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays as the actor has them."""
        return [x.astype(kind.dtype) for x, kind in zip(arrays, self.kinds, strict=True)]

    def words(self, packed: Sequence[np.ndarray]) -> np.ndarray:
        """The packed numbers, one after another. `[N]` uint16"""
        parts = [x.reshape(-1).view(np.uint16) for x, packs in zip(packed, self.packs, strict=True) if packs]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint16)

    def others(self, arrays: Sequence[Any]) -> list[Any]:
        """Those that are not packed."""
        return [x for x, packs in zip(arrays, self.packs, strict=True) if not packs]


@dataclass
class Sender:
    """Makes the messages to one actor, and counts them."""

    packing: Packing
    last: np.ndarray | None = None  # the words that the actor has
    exchanges: int = field(default=0)

    def message(self, packed: Sequence[np.ndarray]) -> tuple[int | None, list[np.ndarray]]:
        """How many words changed, and what to send; None if all is sent."""
        changes = None if self.packing.codec is None else self.packing.codec.changes
        if changes is None:
            return None, list(packed)
        now, last = self.packing.words(packed), self.last
        self.last, self.exchanges = now, self.exchanges + 1
        if last is None or self.exchanges % changes.every == 0:
            return None, list(packed)
        (places,) = np.nonzero(now != last)
        if len(places) > len(now) // changes.one_in:
            return None, list(packed)
        return len(places), [places.astype(np.int32), now[places], *self.packing.others(packed)]


def patched(packing: Packing, last: Sequence[np.ndarray], changed: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays of the last message with what changed: places, words, and the arrays that are not packed."""
    places, words, *others = changed
    now = packing.words(last).copy()
    now[places] = words
    found, start, rest = [], 0, iter(others)
    for kind, packs in zip(packing.packed_kinds, packing.packs, strict=True):
        if packs:
            found.append(now[start : start + kind.size].view(kind.dtype).reshape(kind.shape))
            start += kind.size
        else:
            found.append(next(rest))
    return found
