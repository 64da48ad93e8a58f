"""Data sets of transitions, on disk and in memory, and replay buffers filled with them."""

from msrl_jax.data.check_spaces import check_spaces as check_spaces
from msrl_jax.data.dataset import Dataset as Dataset
from msrl_jax.data.dataset import Episodes as Episodes
from msrl_jax.data.dataset import concatenate as concatenate
from msrl_jax.data.dataset_buffer import buffer as buffer
from msrl_jax.data.formats import from_episodes as from_episodes
from msrl_jax.data.formats import load as load
from msrl_jax.data.formats import save as save
from msrl_jax.data.rollout import record as record
