"""Training: runs, their results, evaluation and logging."""

from msrl_jax.training.callbacks import Callback as Callback
from msrl_jax.training.callbacks import TensorBoard as TensorBoard
from msrl_jax.training.callbacks import Tick as Tick
from msrl_jax.training.callbacks import WandB as WandB
from msrl_jax.training.checkpoint import CheckpointError as CheckpointError
from msrl_jax.training.evaluate import Evaluation as Evaluation
from msrl_jax.training.failure import Failure as Failure
from msrl_jax.training.failure import replay_step as replay_step
from msrl_jax.training.folder import RunFolderError as RunFolderError
from msrl_jax.training.folder import SaveWarning as SaveWarning
from msrl_jax.training.guard import DivergedError as DivergedError
from msrl_jax.training.pbt import PBT as PBT
from msrl_jax.training.result import Result as Result
from msrl_jax.training.resume import ResumeWarning as ResumeWarning
from msrl_jax.training.train import train as train
