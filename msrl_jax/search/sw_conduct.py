"""The course of a sweep: stage after stage, and in each, batch after batch of its trials."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic as now
from typing import Any

import jax

from msrl_jax.envs.host.base import release
from msrl_jax.search import sw_plan as plan
from msrl_jax.search import sw_record as record
from msrl_jax.search.sw_batch import Common, outcome
from msrl_jax.search.sw_search import Order, Stage
from msrl_jax.search.sw_trials import Group, Trial
from msrl_jax.training import processes
from msrl_jax.training.result import Result
from msrl_jax.training.stopping import TIME_LIMIT, StopRequests


@dataclasses.dataclass
class Sweep:
    """A sweep in progress.

    Attributes:
      common: what its runs share.
      groups: its programs; a search adds to them.
      wanted: trials that the user wants at once; None for as many as memory holds.
      path: its folder, if it has one.
      description: what it computes, as plain data.
      saved: the content of `sweep.json` if it goes on.
      say: shows a line of progress.
      trials: all trials so far, by number.
      runs: the runs so far: folders, or results.
      at_once: trials at once, by program.
      shares: the memory of a trial, by program.
    """

    common: Common
    groups: Sequence[Group]
    wanted: int | None
    path: Path | None
    description: Mapping[str, Any]
    saved: Mapping[str, Any]
    say: Callable[[str], None]
    trials: dict[int, Trial] = dataclasses.field(default_factory=dict[int, Trial])
    runs: list[Path | Result] = dataclasses.field(default_factory=list[Path | Result])
    at_once: list[int] = dataclasses.field(default_factory=list[int])
    shares: list[plan.Share] = dataclasses.field(default_factory=list[plan.Share])

    def conduct(self, order: Order, requests: StopRequests) -> str:
        """Trains all stages.

        Args:
          order: gives the stages.
          requests: requests to stop.

        Returns:
          Why the sweep was interrupted; empty if it was not.
        """
        done: list[Trial] | None = None
        for number in range(2**31):
            try:
                stage = next(order) if done is None else order.send(done)
            except StopIteration:
                break
            self.prepare(stage.trials)
            self._write()
            if reason := self._train(number, stage, requests):
                return reason
            done = [self.trials[trial.number] for trial in stage.trials]
        return ""

    def prepare(self, trials: Sequence[Trial]) -> None:
        """Checks and plans the programs that are new; raises ValueError if a trial is invalid or does not fit."""
        self.trials |= {trial.number: trial for trial in trials}
        kept = self.saved.get("programs", [])
        for number in range(len(self.shares), len(self.groups)):
            own = [trial for trial in trials if trial.program == number]
            try:
                setup = self.common.setup(self.groups[number], own[:1])
                try:
                    share = plan.share(setup, self.common.distribution, self.common.devices)
                finally:
                    release(setup.agent.env)
            except ValueError as error:
                raise ValueError(f"{own[0]}: {error}") from None
            self.shares.append(share)
            at_once = self.wanted or share.at_once
            # The members of a run that goes on are those that it began with.
            self.at_once.append(kept[number]["at_once"] if number < len(kept) else at_once)
            members = min(self.at_once[-1], len(own)) * self.common.seeds
            which = f" ({self.groups[number]})" if self.groups[number].fields else ""
            self.say(f"program {number}{which}: {len(own)} trials, {members} members at once, {share}")

    def _write(self) -> None:
        if self.path is not None:
            programs = [
                {**dataclasses.asdict(group), "at_once": at_once, "bytes_of_a_trial": share.nbytes}
                for group, at_once, share in zip(self.groups, self.at_once, self.shares, strict=True)
            ]
            record.write_sweep(self.path, self.description, programs, list(self.trials.values()), self.saved)

    def _train(self, number: int, stage: Stage, requests: StopRequests) -> str:
        """Trains a stage; gives the reason if it was interrupted."""
        of_program = {n: [t for t in stage.trials if t.program == n] for n in sorted({t.program for t in stage.trials})}
        batches = [
            (program, i, batch)
            for program, trials in of_program.items()
            for i, batch in enumerate(plan.batches(trials, self.at_once[program]))
        ]
        for count, (program, i, batch) in enumerate(batches, 1):
            left = None if requests.deadline is None else requests.deadline - now()
            reasons = processes.gathered(requests.reason(0.0) if left is None or left > 0 else TIME_LIMIT)
            if reason := next(filter(None, reasons), ""):
                return reason
            where = None if self.path is None else self.path / f"stage-{number}" / f"program-{program}" / f"batch-{i}"
            names = f"trial {batch[0].number}" if len(batch) == 1 else f"{len(batch)} trials from {batch[0].number} on"
            self.say(f"stage {number}, run {count} of {len(batches)}: {names}, program {program}, to {stage.until:,} steps")
            before = [(self.runs[trial.run], trial.member) for trial in batch if trial.run is not None]
            result = self.common.run(self.groups[program], batch, before, stage.until, where, left)
            if result.interrupted:
                return result.stop_reason
            self.trials |= {t.number: t for t in outcome(batch, self.common.seeds, result, stage.rung, len(self.runs))}
            self.runs.append(_on_host(result) if where is None else where)
        return ""


def _on_host(result: Result) -> Result:
    """A result whose state leaves the devices to the next run."""
    if all(device.platform == "cpu" for leaf in jax.tree.leaves(result.state) for device in leaf.devices()):
        return result
    return dataclasses.replace(result, state=jax.device_put(result.state, jax.local_devices(backend="cpu")[0]))
