"""`Outcome`: what a run folder says about a run, read without its agent, its environment, or any code that it names."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_jax.fragments.support.checks import suggestion, whole
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.disk import store
from msrl_jax.run.disk.folder import CONFIG
from msrl_jax.run.evaluation.evaluate import Evaluation
from msrl_jax.run.evaluation.history import last_mean
from msrl_jax.run.experiment.plain_data import MOST_SEEDS, RunFolderError, each_member
from msrl_jax.run.loop.loop import Status
from msrl_jax.run.summary import card, describe, summarize

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Outcome:
    """The settings of a run, its history and how it ended. `C` denotes the number of chunks, `M` the number of members.

    Attributes:
      description: what the run computed and where it ran, as plain data: the content of `config.json`.
      history: columns with one value per chunk, as in `Result`. shape=[C] or [C, M]
      status: how the run ended, as in `Result`.
      compile_seconds: time for tracing and compiling the training program and the initial state.
      wall_seconds: total time of the run, excluding saving.
      evaluation: the last evaluation, if there was one.
      folder: the run's folder, if it has one.
      timings: other parts of `wall_seconds`, as in `Result`.
      stop_reason: why the run was interrupted; otherwise empty.
      save_error: why something could not be saved, as in `Result`; otherwise empty.
    """

    description: Mapping[str, Any]
    history: Mapping[str, np.ndarray]
    status: Status
    compile_seconds: float
    wall_seconds: float
    evaluation: Evaluation | None
    folder: Path | None = None
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stop_reason: str = ""
    save_error: str = ""

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        """Reads the outcome of a run from its folder, up to the newest checkpoint; runs no code that the folder names.

        Raises:
          RunFolderError: if the folder holds no run, a damaged one, or one that this version cannot read.
        """
        outcome = cls(**store.read_outcome(path))
        try:
            about = outcome.description
            whole("members", about["seeds"] * max(map(len, (about["settings"] or {}).values()), default=1), most=MOST_SEEDS)
            describe(outcome)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            fact = f"{path / CONFIG} does not describe a run ({type(error).__name__}: {error})"
            raise RunFolderError(f"{fact}; restore the file, or start a new run") from error
        return outcome

    @property
    def rank_by(self) -> str:
        """The score that ranks members and checkpoints."""
        return self.description["rank_by"]

    @property
    def unit(self) -> str:
        """The unit of steps in the history: "environment steps" or "updates"."""
        return self.description.get("unit", "environment steps")  # folders of older versions have no unit

    @property
    def seeds(self) -> int:
        """The number of seeds; every setting of the config has one member per seed."""
        return self.description["seeds"]

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The seed of every member, and its values of the config fields in which members differ; the initial values for a
        population that is trained."""
        about = self.description
        return each_member(about["seed"], about["seeds"], about["settings"] or {}, evolve=about["pbt"] is not None)

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self.settings)

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second of all members: the median over all chunks except the first, if there are several."""
        rates = self.history.get("steps_per_second", ())
        return float(np.median(rates[1:] if len(rates) > 1 else rates)) if len(rates) else float("nan")

    def final(self, name: str) -> np.ndarray:
        """Returns the mean of a history column over the last tenth of training; raises KeyError if it has no such column."""
        if name not in self.history:
            hint, columns = suggestion(name, self.history), ", ".join(sorted(self.history))
            raise KeyError(f"the history has no column {name!r}{hint}; it has {columns}")
        return last_mean(self.history[name])

    @entry
    def to_pandas(self) -> "pandas.DataFrame":
        """Makes a long table of the history, with one row per chunk and member.

        Returns:
          A DataFrame with the columns of the history, `member`, `seed`, and the config fields in which settings differ. Fields
          that PBT changes are in columns `pbt/FIELD`.

        Raises:
          ImportError: if pandas is not installed; the message says how to install it.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas needs the package 'pandas'; install it with: pip install pandas") from error
        about = pandas.DataFrame(self.settings)[["seed"] if self.description["pbt"] else [*self.settings[0]]]
        members, chunks = np.arange(self.members), len(self.history["step"])
        table = about.iloc[np.tile(members, chunks)].reset_index(drop=True)
        table.insert(0, "member", np.tile(members, chunks))
        rows = {name: x.reshape(-1) if x.ndim > 1 else np.repeat(x, self.members) for name, x in self.history.items()}
        return table.assign(**rows)

    def summary(self) -> dict[str, Any]:
        """Summarizes the run as plain data: the content of `summary.json`.

        Returns:
          The summary. `episode_return` is the mean over the last tenth of training, and `eval_return` the mean over the last
          evaluation, both averaged over the members; `*_per_seed` lists the values of the members. With several teams, there
          are also `episode_return/TEAM` and `eval_return/TEAM`. `episode_METRIC` and `eval_METRIC` are metrics of the
          environment.
        """
        return summarize(self)

    def __repr__(self) -> str:
        return describe(self)

    def _repr_html_(self) -> str:
        return card(self)
