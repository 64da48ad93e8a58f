"""Experiments: what a run computes, its loop and hooks, its folder, and its result."""

from msrl_jax._naming import TrustError as TrustError
from msrl_jax.experiment.callbacks import Callback as Callback
from msrl_jax.experiment.callbacks import TensorBoard as TensorBoard
from msrl_jax.experiment.callbacks import Tick as Tick
from msrl_jax.experiment.callbacks import WandB as WandB
from msrl_jax.experiment.checkpoint import CheckpointError as CheckpointError
from msrl_jax.experiment.choosing import Choice as Choice
from msrl_jax.experiment.choosing import choose_policy as choose_policy
from msrl_jax.experiment.evaluate import Evaluation as Evaluation
from msrl_jax.experiment.fitted_q import FittedQ as FittedQ
from msrl_jax.experiment.fitted_q import OffPolicyEstimate as OffPolicyEstimate
from msrl_jax.experiment.folder import NotSavedError as NotSavedError
from msrl_jax.experiment.folder import RunFolderError as RunFolderError
from msrl_jax.experiment.folder import SaveWarning as SaveWarning
from msrl_jax.experiment.guard import DivergedError as DivergedError
from msrl_jax.experiment.nonfinite import Failure as Failure
from msrl_jax.experiment.nonfinite import replay_step as replay_step
from msrl_jax.experiment.pbt import PBT as PBT
from msrl_jax.experiment.result import Result as Result
from msrl_jax.experiment.run import Ending as Ending
from msrl_jax.experiment.run import Run as Run
from msrl_jax.experiment.spec import Experiment as Experiment
from msrl_jax.experiment.store import ResumeWarning as ResumeWarning
from msrl_jax.experiment.train import train as train
from msrl_jax.experiment.video import Filming as Filming
from msrl_jax.experiment.video import Video as Video
