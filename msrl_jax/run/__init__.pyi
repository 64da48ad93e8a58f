"""The names of the package, for type checkers and for `lazy`, which imports each at its first use."""

from msrl_jax.fragments.support.naming import TrustError as TrustError
from msrl_jax.run.auto_policy import Choice as Choice
from msrl_jax.run.auto_policy import choose_policy as choose_policy
from msrl_jax.run.disk.checkpoint import CheckpointError as CheckpointError
from msrl_jax.run.disk.folder import NotSavedError as NotSavedError
from msrl_jax.run.disk.folder import SaveWarning as SaveWarning
from msrl_jax.run.disk.store import ResumeWarning as ResumeWarning
from msrl_jax.run.evaluation.evaluate import Evaluation as Evaluation
from msrl_jax.run.experiment.experiment import Experiment as Experiment
from msrl_jax.run.experiment.pbt import PBT as PBT
from msrl_jax.run.experiment.plain_data import RunFolderError as RunFolderError
from msrl_jax.run.loop.callbacks import Callback as Callback
from msrl_jax.run.loop.callbacks import TensorBoard as TensorBoard
from msrl_jax.run.loop.callbacks import Tick as Tick
from msrl_jax.run.loop.callbacks import WandB as WandB
from msrl_jax.run.loop.guard import DivergedError as DivergedError
from msrl_jax.run.loop.loop import Run as Run
from msrl_jax.run.loop.loop import StopReason as StopReason
from msrl_jax.run.outputs.export import export as export
from msrl_jax.run.outputs.figures import plot as plot
from msrl_jax.run.outputs.figures import plot_lineage as plot_lineage
from msrl_jax.run.outputs.video import Filming as Filming
from msrl_jax.run.outputs.video import Video as Video
from msrl_jax.run.outputs.video import video as video
from msrl_jax.run.result import Result as Result
from msrl_jax.run.training import train as train
