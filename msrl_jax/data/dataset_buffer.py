"""A data set as a replay buffer that is full from the start."""

from typing import Any

import jax
import numpy as np

from msrl_jax import replay
from msrl_jax.data.dataset import MASKS, Dataset
from msrl_jax.envs import MaskedObservation
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.replay import ReplayBuffer, ReplayState, Transition
from msrl_jax.replay.ring import Storage


@entry
def buffer(
    dataset: Dataset,
    *,
    batch_size: int,
    length: int = 1,
    discount: float | None = None,
    shards: int = 1,
    storage: Storage | None = None,
) -> tuple[ReplayBuffer, ReplayState]:
    """Copies a data set into a uniform replay buffer with `G` lanes, one per shard, of `N // G` rows each.

    The last `N % G` rows are dropped. The last row of a lane is truncated unless it is terminated, and no window starts at the
    last `length - 1` rows of a lane.

    Args:
      dataset: the data set.
      batch_size: number of windows per batch, `B`.
      length: number of steps per window; the n of n-step transitions.
      discount: if given, windows are folded into n-step transitions, as in `replay.uniform`.
      shards: number of parts that can be on different devices, `G`; a divisor of `batch_size`. Samples depend on it.
      storage: codecs, as in `replay.uniform`.

    Returns:
      The buffer and its state of host arrays. Pass the state to a compiled program as an argument; otherwise it becomes a
      constant of the program.

    Raises:
      ValueError: if the data set is too small for a batch or a window, if sizes are incompatible, or if it has several agents.
    """
    if dataset.has_agents:
        raise ValueError(
            f"the rows of the data set are steps of {dataset.reward.shape[1]} agents (it has the field valid), but a data "
            "set buffer needs a single agent; use data of a single-agent environment"
        )
    steps = len(dataset) // shards
    if steps < length or (steps - length + 1) * shards < batch_size:
        raise ValueError(
            f"the data set has {len(dataset)} rows, {steps} in each of shards={shards}: fewer than batch_size={batch_size} "
            f"windows of {length} steps; collect more data, or use smaller batches or fewer shards"
        )

    def lanes(x: np.ndarray) -> np.ndarray:
        by_lane = np.swapaxes(x[: steps * shards].reshape(shards, steps, *x.shape[1:]), 0, 1)
        return by_lane.astype(jax.dtypes.canonicalize_dtype(x.dtype))

    items: dict[str, Any] = {name: jax.tree.map(lanes, getattr(dataset, name)) for name in dataset.fields}
    items["truncated"][-1] |= ~items["terminated"][-1]
    if dataset.has_masks:
        items |= {name: MaskedObservation(items[name], items.pop(mask)) for name, mask in MASKS.items()}
    example: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), Transition(**items))
    replay_buffer = replay.uniform(
        example,
        capacity=steps * shards,
        num_envs=shards,
        unroll_length=steps,
        batch_size=batch_size,
        length=length,
        discount=discount,
        shards=shards,
        storage=storage,
    )
    # Evaluate eagerly, even if an agent is built inside a trace.
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        state = jax.jit(lambda items: replay_buffer.insert(replay_buffer.init(), items))(Transition(**items))
        lost = int(state.lost.sum())
    if lost:
        raise ValueError(f"storage={storage} cannot store {lost} rows of the data set exactly; use another codec or None")
    return replay_buffer, jax.device_get(state)
