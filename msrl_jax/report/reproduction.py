"""Recipes as experiments, and their reproduction: train several seeds, score them, and compare with the record."""

import dataclasses
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from msrl_jax import policies
from msrl_jax._files import as_path
from msrl_jax.envs.base import close_simulators, is_on_host
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.support.checks import check_seed, whole
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.report.best_agents import BestAgents
from msrl_jax.report.provenance import origin_of, source_checksum
from msrl_jax.report.statistics import FALSE_ALARM, Agreement, agreement, estimate, mean
from msrl_jax.run import recipes
from msrl_jax.run.capacity import memory_of
from msrl_jax.run.disk.store import check_saved
from msrl_jax.run.experiment.spec import Experiment
from msrl_jax.run.loop.callbacks import ProgressDisplay
from msrl_jax.run.loop.hooks import seconds as read_seconds
from msrl_jax.run.prepare import make_experiment
from msrl_jax.run.recipes import Recipe, Record, RecordError
from msrl_jax.run.result import Result
from msrl_jax.run.training import train

SEEDS, _MOST_SEEDS = 10, 10_000
EPISODES = 256  # for the score of the best agent
_CHUNKS, _EVALUATIONS = 100, 20  # points of a curve, and evaluations from which the best one is chosen


@entry
def recipe(name: str) -> Experiment:
    """Returns the experiment of a recipe, for `train`; `dataclasses.replace(msrl.recipe(name), seed=1)` changes the seed.

    Args:
      name: its name, such as `"ppo-breakout"`; `msrl-jax list --recipes` lists them.

    Returns:
      The experiment.

    Raises:
      ValueError: if the name is unknown; the message suggests the nearest one.
    """
    return _experiment(recipes.find(name))


def _experiment(found: Recipe) -> Experiment:
    own = {key: value for key, value in found.settings.items() if key not in found.fields}
    try:
        if "policy" in found.values:
            policies.get(found.values["policy"])
        return make_experiment(**own, **{key: _value(value) for key, value in found.fields.items()})
    except (TypeError, ValueError) as error:
        raise type(error)(f"the recipe {found.path}: {error}") from None


def comparable(found: Recipe, folder: Path | None) -> Record | None:
    """Returns the record of a recipe in a folder of records, or None; raises RecordError if it is damaged, or if its settings
    or omitted defaults have changed since."""
    record = recipes.record_of(found, folder)
    if record is not None:
        recipes.check_same(found.name, record.config, _experiment(found).to_json()["config"])
    return record


def _value(value: Any) -> Any:
    """Converts a TOML value to Python."""
    if isinstance(value, list):
        return tuple(map(_value, value))
    return None if value == "None" else value


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """A recipe trained again.

    Attributes:
      recipe: its name.
      record: its scores; None if it was interrupted.
      recorded: the record of the recipe; None without a record.
      stop_reason: the reason of an interruption, such as "SIGINT"; empty if complete. Repeat the call to resume.
      folder: the folder of its runs.
      is_of_other_code: whether some of its seeds were trained earlier with other code of this package.
    """

    recipe: str
    record: Record | None
    recorded: Record | None
    stop_reason: str
    folder: Path
    is_of_other_code: bool = False

    @property
    def agreements(self) -> dict[str, Agreement]:
        """Whether the means of `last` and of `best` agree with those of the record; empty without a record."""
        if self.record is None or self.recorded is None:
            return {}
        now, was = self.record, self.recorded
        return {name: agreement(np.array(getattr(now, name)), np.array(getattr(was, name))) for name in ("last", "best")}

    @property
    def verdict(self) -> str:
        """ "agrees" if both scores do, "does not agree" if one does not, "too few" seeds, "no record", or "interrupted"."""
        if self.record is None:
            return "interrupted"
        found = {each.verdict for each in self.agreements.values()}
        return next((word for word in ("does not agree", "too few", "agrees") if word in found), "no record")

    def summary(self) -> dict[str, Any]:
        """Returns the reproduction as plain data."""
        about: dict[str, Any] = {"recipe": self.recipe, "verdict": self.verdict, "folder": str(self.folder)}
        if self.stop_reason:
            about["stop_reason"] = self.stop_reason
        if self.record is not None:
            about |= {"false_alarm": 2 * FALSE_ALARM, "record": dataclasses.asdict(self.record)}
            about |= {name: dataclasses.asdict(each) for name, each in self.agreements.items()}
        return about

    def __repr__(self) -> str:
        if self.record is None:
            return f"{self.recipe}: interrupted ({self.stop_reason}); repeat the command to resume it"
        record, seeds = self.record, self.record.seeds
        what = {"last": "over the last tenth", "best": f"best agent, {record.episodes} greedy episodes"}
        lines = [
            f"{self.recipe}: {record.settings['algo']} on {record.settings['env']}, {record.steps[-1]:,} steps, "
            f"seeds {seeds[0]} to {seeds[-1]}: {self.verdict}"
        ]
        for name, words in what.items():
            found = estimate([np.array(getattr(record, name))], mean)
            line = f"  {words:36}{found}"
            if self.recorded is not None:
                other, each = estimate([np.array(getattr(self.recorded, name))], mean), self.agreements[name]
                chance = "" if math.isnan(each.probability) else f", p = {each.probability:.2g}"
                line += f"; recorded {other}: {each.verdict}{chance}"
            lines.append(line)
        wall = f"{record.seconds['wall']:,.0f} s on {record.place}"
        if self.recorded is not None:
            wall += f"; recorded {self.recorded.seconds['wall']:,.0f} s on {self.recorded.place}"
            was = self.recorded.versions
            changed = [f"{n} {x} (recorded {was[n]})" for n, x in record.versions.items() if x != was.get(n, x)]
            if record.commit != self.recorded.commit:
                changed += [f"commit {record.commit or 'unknown'} (recorded {self.recorded.commit or 'unknown'})"]
            wall += f"; {', '.join(changed)}" if changed else ""
        if self.is_of_other_code:
            wall += f"\n  seeds were trained before, by other code of this package; delete {self.folder} to train them again"
        return "\n".join([*lines, f"  {wall}", f"  a false alarm has probability {2 * FALSE_ALARM:g} at most"])


@entry
def reproduce(
    name: str,
    *,
    seeds: int | None = None,
    seed: int | None = None,
    out: str | os.PathLike | None = None,
    compare: bool = True,
    records: str | os.PathLike | None = None,
    policy: str | DistributionPolicy | None = None,
    devices: Sequence[Device] | None = None,
    time_limit: float | str | None = None,
    progress: ProgressDisplay = "auto",
) -> Reproduction:
    """Trains a recipe on several seeds, scores it, and tests whether the scores agree with the recorded ones.

    Trains all seeds that fit in memory in one program; with a simulator on the host, trains them one after another. If the
    process is killed or interrupted, repeat the call to resume.

    Args:
      name: the name of a recipe.
      seeds: the number of seeds; if None, that of the record, or 10 without a record.
      seed: the first seed; if None, that of the record, or 0.
      out: folder for the runs and the new record, `NAME.json`; `reproduced/NAME` if None.
      compare: whether to read the record of the recipe, and compare with it.
      records: folder of the records, each in `NAME.json`; if None, `benchmarks/records` of the clone that the package is
        imported from or that is the working directory. Without a clone, nothing is compared, and a line on stderr says so.
      policy: as in `train`; if None, that of the recipe, or the default.
      devices: as in `train`.
      time_limit: as in `train`, for all seeds together.
      progress: as in `train`.

    Returns:
      The reproduction. Two scores are compared: the mean return over the last tenth of training, and the mean return of 256
      greedy episodes of the best agent of 20 evaluations (Agarwal et al., 2108.13264). Each comparison is a permutation test of
      the means at 1%, so equal distributions are reported as "does not agree" in at most 2% of cases.

    Raises:
      ValueError: if the name is unknown, the folder holds something else, `records` is missing, or a record is damaged; if the
        recipe is not one setting with evaluations; if there are several processes, or if no episode of a seed ended.
    """
    if jax.process_count() > 1:
        raise ValueError("reproduce works in a single process only; run it without --distributed and jax.distributed")
    found = recipes.find(name)
    folder = recipes.records_folder(records)
    if compare and folder is None and progress is not False:
        print(recipes.NO_RECORDS, file=sys.stderr)
    recorded = comparable(found, folder) if compare else None
    limit = None if time_limit is None else read_seconds("time_limit", time_limit)
    base = _experiment(found)
    if base.has_members:
        raise ValueError(f"{found.path} has several settings ({', '.join(base.settings)}); write a recipe for each of them")
    if found.values.get("eval_episodes") == 0:
        raise ValueError(f"eval_episodes is 0 in {found.path}, but evaluations choose the best agent; leave it out")
    wanted = seeds_of(recorded, seeds, seed)
    path = Path("reproduced", found.name) if out is None else as_path("out", out)
    target = path / f"{found.name}.json"
    there = _record_there(target, found, base)
    ends = None if limit is None else time.monotonic() + limit
    where = policies.get(found.values.get("policy", base.usual_policy) if policy is None else policy)
    watching = {"eval_episodes": found.values.get("eval_episodes", 32), "eval_every": found.values.get("eval_every")}
    watching["eval_every"] = watching["eval_every"] or max(1, base.total_steps // _EVALUATIONS)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder {path} cannot be created ({error.strerror}); choose another one (--out)") from None
    results, agents = list[Result](), list[BestAgents]()
    hook: Any
    for numbers in _groups(base, where, devices, wanted, path):
        experiment = dataclasses.replace(base, seed=numbers[0], seeds=len(numbers))
        hook = BestAgents()
        result = train(
            experiment,
            policy=where,
            devices=devices,
            out=path / f"seeds-{numbers[0]}-{numbers[-1]}",
            resume=True,
            chunk=max(1, experiment.iterations // _CHUNKS),
            callbacks=[hook],
            progress=progress,
            **watching,
            time_limit=None if ends is None else max(1e-3, ends - time.monotonic()),
        )
        check_saved(result)
        if result.interrupted:
            return Reproduction(found.name, None, recorded, result.stop_reason, path)
        assert result.folder is not None
        hook.read(result.folder)
        hook.check(result)
        results.append(result)
        agents.append(hook)
    origins = [origin_of(result.folder) for result in results if result.folder is not None]
    record = _record(found, results, agents, origins)
    if there is None or len(record.seeds) >= len(there.seeds):  # never replace a record by one with fewer seeds
        record.write(target)
    return Reproduction(found.name, record, recorded, "", path, {each["sources"] for each in origins} != {source_checksum()})


def seeds_of(recorded: Record | None, seeds: int | None, seed: int | None) -> range:
    """Returns the seeds to train: the given ones, those of the record, or 0 to 9; raises ValueError if they are invalid."""
    known = range(SEEDS) if recorded is None else recorded.seeds
    count = len(known) if seeds is None else whole("seeds", seeds, most=_MOST_SEEDS)
    first = check_seed(known[0] if seed is None else seed, count)
    return range(first, first + count)


def _record_there(target: Path, found: Recipe, base: Experiment) -> Record | None:
    """Returns the record of an earlier reproduction; raises RecordError if the file is something else, to protect it."""
    try:
        there = Record.read(target) if target.exists() else None
    except RecordError:
        fact = f"{target} is damaged, or not a record of this version"
        raise RecordError(f"{fact}; move it, or choose another folder (--out)") from None
    if there is not None:
        now = {**base.to_json()["config"], **found.settings}
        if changed := recipes.difference({**there.config, **there.settings}, now):
            raise RecordError(f"{target} is {changed}; move the folder {target.parent}, or choose another one (--out)")
    return there


def _groups(
    base: Experiment, policy: DistributionPolicy, devices: Sequence[Device] | None, seeds: range, path: Path
) -> list[range]:
    """Splits seeds into groups of about equal size that fit in memory; one seed per group if the host simulates.

    Groups that already have a folder do not change, even if less memory is available now.
    """
    try:
        at_once = 1 if is_on_host(base.environment) else memory_of(base, policy, devices)[0]
    finally:
        close_simulators(base.behavior.agent.env)
    parts = [re.fullmatch(r"seeds-(\d+)-(\d+)", folder.name) for folder in path.glob("seeds-*-*")]
    begun = sorted((int(match[1]), int(match[2]) + 1) for match in parts if match)
    groups, at = list[range](), seeds.start
    while at < seeds.stop:
        if known := [end for start, end in begun if start == at < end <= seeds.stop]:
            groups.append(range(at, known[-1]))
        else:
            stop = next((start for start, end in begun if at < start < end <= seeds.stop), seeds.stop)
            number = math.ceil((stop - at) / at_once)
            bounds = [at + round(i * (stop - at) / number) for i in range(number + 1)]
            groups += [range(low, high) for low, high in itertools.pairwise(bounds)]
        at = groups[-1].stop
    return groups


def _record(
    found: Recipe, results: Sequence[Result], agents: Sequence[BestAgents], origins: Sequence[dict[str, Any]]
) -> Record:
    """Makes the record of the runs of a recipe."""
    experiment = results[0].experiment
    names = [f"episode_{experiment.rank_by}", f"eval_{experiment.rank_by}"]  # offline RL has no training episodes
    for result in results:
        if not any(name in result.history for name in names):
            raise RecordError(f"the history of {result.folder} is missing; delete the folder, and reproduce it again")
    score = next(name for name in names if name in results[0].history)
    curves = np.concatenate([np.reshape(r.history[score], (len(r.history["step"]), -1)) for r in results], axis=1).T
    seeds = [s for r in results for s in _seeds(r.experiment)]
    last = np.concatenate([np.atleast_1d(r.final(score)) for r in results])
    if np.isnan(last).any():
        seed = seeds[int(np.argmax(np.isnan(last)))]
        raise ValueError(f"{found.name} has no score: seed {seed} ended no episode with a {experiment.rank_by}; train longer")
    best = np.concatenate([each.play(r.experiment, EPISODES) for r, each in zip(results, agents, strict=True)])
    if not np.isfinite([last, best]).all():
        seed = seeds[int(np.argmin(np.isfinite([last, best]).all(0)))]
        raise ValueError(f"the scores of {found.name} are not finite on seed {seed}; fix the environment's rewards or metrics")
    evaluated = np.isfinite(np.reshape(results[0].history["eval_return"], (curves.shape[1], -1))[:, 0]).tolist()
    parts = {"wall": [r.wall_seconds for r in results], "compile": [r.compile_seconds for r in results]}
    parts |= {name.removesuffix("_seconds"): [r.timings[name] for r in results] for name in results[0].timings}
    steps = results[0].history["step"].astype(int).tolist()
    return Record(
        recipe=found.name,
        settings=dict(found.settings),
        config=experiment.to_json()["config"],
        steps=steps,
        seeds=seeds,
        returns=[[None if math.isnan(x) else float(f"{x:.6g}") for x in curve] for curve in curves.tolist()],
        last=last.tolist(),
        best=best.tolist(),
        best_steps=np.concatenate([each.steps for each in agents]).astype(int).tolist(),
        evaluations=[step for step, known in zip(steps, evaluated, strict=True) if known],
        episodes=EPISODES,
        score=experiment.rank_by,
        seconds={name: round(sum(each), 1) for name, each in parts.items()},
        versions=origins[0]["versions"],
        commit=_joined(origins, "commit"),
        date=max(each["date"] for each in origins),
        hardware={name: results[0].description["devices"][name] for name in ("platform", "kind", "count")}
        | {"processor": _joined(origins, "processor"), "cores": origins[0]["cores"]},
    )


def _seeds(experiment: Experiment) -> range:
    return range(experiment.seed, experiment.seed + experiment.seeds)


def _joined(origins: Sequence[dict[str, Any]], name: str) -> str:
    return ", ".join(dict.fromkeys(each[name] for each in origins))
