"""Replay buffers: store experience, and sample batches of it for learning."""

from msrl_jax.replay.base import SHARD_AXIS as SHARD_AXIS
from msrl_jax.replay.base import Indices as Indices
from msrl_jax.replay.base import NStep as NStep
from msrl_jax.replay.base import ReplayBuffer as ReplayBuffer
from msrl_jax.replay.base import ReplayState as ReplayState
from msrl_jax.replay.base import Sample as Sample
from msrl_jax.replay.base import Transition as Transition
from msrl_jax.replay.buffers import importance_weights as importance_weights
from msrl_jax.replay.buffers import prioritized as prioritized
from msrl_jax.replay.buffers import uniform as uniform
from msrl_jax.replay.fifo import Fifo as Fifo
from msrl_jax.replay.fifo import FifoState as FifoState
from msrl_jax.replay.fifo import fifo as fifo
from msrl_jax.replay.relabelling import Relabelling as Relabelling
