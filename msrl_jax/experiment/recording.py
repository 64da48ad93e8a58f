"""The hook that records the steps of a run for a data set."""

import os
from pathlib import Path

from msrl_jax.data.experience import ExperienceWriter
from msrl_jax.data.files import check_new
from msrl_jax.data.spaces import bytes_per_step
from msrl_jax.experiment.pace import chunk_length
from msrl_jax.experiment.run import Run
from msrl_jax.experiment.spec import Experiment
from msrl_jax.experiment.store import Saved

_RING_BYTES = 2**26
"""Largest size of the steps of a chunk on the devices, if `chunk` is not given."""


class Recording:
    """Writes the steps of every chunk."""

    def __init__(self, writer: ExperienceWriter):
        self.writer = writer

    def after(self, run: Run) -> None:
        """Writes the steps since the last chunk."""
        taken = run.iteration * (run.experiment.steps_per_iteration // run.experiment.behavior.agent.env.num_envs)
        self.writer.add(run.program.unwrap(run.run_state), taken - self.writer.progress["steps"])

    def end(self, run: Run) -> None:
        """Joins the steps into one file; their parts stay if the run may go on later."""
        self.writer.finish(goes_on=run.path is not None and run.ending.status not in ("finished", "diverged"))


def recorded(
    experiment: Experiment, record: Path | None, chunk: int | None, policy: str, saved: Saved | None
) -> tuple[Experiment, Recording | None, int]:
    """The run with recorded environments if it is recorded, its hook, and the largest number of iterations of a chunk."""
    most = min(chunk or chunk_length(experiment.iterations), experiment.iterations)
    done: dict[str, int] | None = None
    if saved is not None:
        done = {"steps": 0, "parts": 0} if saved.checkpoint is None else saved.checkpoint.progress["recorded"]
        if done is None and record is not None:
            raise ValueError(f"record={str(record)!r}: the run in {saved.path} is not recorded from its start; leave it out")
        was = saved.description["record"]
        if record is None:
            record = None if was is None else Path(was)
        elif was is None or os.path.abspath(record) != was:
            check_new(record)  # the further steps go to a file of their own
            done = None if done is None else done | {"parts": 0}
    if record is None:
        return experiment, None, most
    agent = experiment.behavior.agent
    if agent.unit != "environment steps":
        raise ValueError(f"record={str(record)!r}: {experiment.name} takes no environment steps; leave it out")
    steps = agent.steps_per_iteration // agent.env.num_envs
    if chunk is None:
        size = bytes_per_step(experiment.environment) * agent.steps_per_iteration * experiment.members
        most = max(1, min(most, _RING_BYTES // size))
    writer = ExperienceWriter(record, experiment.about() | {"policy": policy}, done)
    return experiment.record(most * steps), Recording(writer), most
