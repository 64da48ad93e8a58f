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
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.loop.callbacks import ProgressDisplay
from msrl_jax.run.loop.hooks import parse_duration
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
    return _make_experiment(recipes.find(name))


def _make_experiment(recipe_file: Recipe) -> Experiment:
    arguments = {key: value for key, value in recipe_file.settings.items() if key not in recipe_file.fields}
    try:
        if "policy" in recipe_file.values:
            policies.get(recipe_file.values["policy"])
        return make_experiment(**arguments, **{key: _to_python(value) for key, value in recipe_file.fields.items()})
    except (TypeError, ValueError) as error:
        raise type(error)(f"the recipe {recipe_file.path}: {error}") from None


def comparable(recipe_file: Recipe, folder: Path | None) -> Record | None:
    """Returns the record of a recipe in a folder of records, or None; raises RecordError if it is damaged, or if its settings
    or omitted defaults have changed since."""
    record = recipes.record_of(recipe_file, folder)
    if record is not None:
        recipes.check_same(recipe_file.name, record.config, _make_experiment(recipe_file).to_json()["config"])
    return record


def _to_python(value: Any) -> Any:
    """Converts a TOML value to Python."""
    if isinstance(value, list):
        return tuple(map(_to_python, value))
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
        record, recorded = self.record, self.recorded
        return {
            name: agreement(np.array(getattr(record, name)), np.array(getattr(recorded, name))) for name in ("last", "best")
        }

    @property
    def verdict(self) -> str:
        """ "agrees" if both scores do, "does not agree" if one does not, "too few" seeds, "no record", or "interrupted"."""
        if self.record is None:
            return "interrupted"
        verdicts = {result.verdict for result in self.agreements.values()}
        return next((word for word in ("does not agree", "too few", "agrees") if word in verdicts), "no record")

    def summary(self) -> dict[str, Any]:
        """Returns the reproduction as plain data."""
        about: dict[str, Any] = {"recipe": self.recipe, "verdict": self.verdict, "folder": str(self.folder)}
        if self.stop_reason:
            about["stop_reason"] = self.stop_reason
        if self.record is not None:
            about |= {"false_alarm": 2 * FALSE_ALARM, "record": dataclasses.asdict(self.record)}
            about |= {name: dataclasses.asdict(result) for name, result in self.agreements.items()}
        return about

    def __repr__(self) -> str:
        if self.record is None:
            return f"{self.recipe}: interrupted ({self.stop_reason}); repeat the command to resume it"
        record, seeds = self.record, self.record.seeds
        headings = {"last": "over the last tenth", "best": f"best agent, {record.episodes} greedy episodes"}
        lines = [
            f"{self.recipe}: {record.settings['algo']} on {record.settings['env']}, {record.steps[-1]:,} steps, "
            f"seeds {seeds[0]} to {seeds[-1]}: {self.verdict}"
        ]
        for name, words in headings.items():
            ours = estimate([np.array(getattr(record, name))], mean)
            line = f"  {words:36}{ours}"
            if self.recorded is not None:
                theirs, comparison = estimate([np.array(getattr(self.recorded, name))], mean), self.agreements[name]
                chance = "" if math.isnan(comparison.probability) else f", p = {comparison.probability:.2g}"
                line += f"; recorded {theirs}: {comparison.verdict}{chance}"
            lines.append(line)
        wall = f"{record.seconds['wall']:,.0f} s on {record.place}"
        if self.recorded is not None:
            wall += f"; recorded {self.recorded.seconds['wall']:,.0f} s on {self.recorded.place}"
            recorded_versions = self.recorded.versions
            changes = [
                f"{n} {version} (recorded {recorded_versions[n]})"
                for n, version in record.versions.items()
                if version != recorded_versions.get(n, version)
            ]
            if record.commit != self.recorded.commit:
                changes += [f"commit {record.commit or 'unknown'} (recorded {self.recorded.commit or 'unknown'})"]
            wall += f"; {', '.join(changes)}" if changes else ""
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
    recipe_file = recipes.find(name)
    folder = recipes.records_folder(records)
    if compare and folder is None and progress is not False:
        print(recipes.NO_RECORDS, file=sys.stderr)
    recorded = comparable(recipe_file, folder) if compare else None
    limit = None if time_limit is None else parse_duration("time_limit", time_limit)
    base = _make_experiment(recipe_file)
    if base.has_members:
        raise ValueError(
            f"{recipe_file.path} has several settings ({', '.join(base.settings)}); write a recipe for each of them"
        )
    if recipe_file.values.get("eval_episodes") == 0:
        raise ValueError(f"eval_episodes is 0 in {recipe_file.path}, but evaluations choose the best agent; leave it out")
    seed_range = seeds_of(recorded, seeds, seed)
    path = Path("reproduced", recipe_file.name) if out is None else as_path("out", out)
    target = path / f"{recipe_file.name}.json"
    old_record = _read_old_record(target, recipe_file, base)
    ends = None if limit is None else time.monotonic() + limit
    resolved_policy = policies.get(recipe_file.values.get("policy", base.usual_policy) if policy is None else policy)
    watching = {
        "eval_episodes": recipe_file.values.get("eval_episodes", 32),
        "eval_every": recipe_file.values.get("eval_every"),
    }
    watching["eval_every"] = watching["eval_every"] or max(1, base.total_steps // _EVALUATIONS)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder {path} cannot be created ({error.strerror}); choose another one (--out)") from None
    results, agents = list[Result](), list[BestAgents]()
    hook: Any
    for numbers in _split_seeds(base, resolved_policy, devices, seed_range, path):
        experiment = dataclasses.replace(base, seed=numbers[0], seeds=len(numbers))
        hook = BestAgents()
        result = train(
            experiment,
            policy=resolved_policy,
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
            return Reproduction(recipe_file.name, None, recorded, result.stop_reason, path)
        assert result.folder is not None
        hook.read(result.folder)
        hook.check(result)
        results.append(result)
        agents.append(hook)
    origins = [origin_of(result.folder) for result in results if result.folder is not None]
    record = _make_record(recipe_file, results, agents, origins)
    if old_record is None or len(record.seeds) >= len(old_record.seeds):  # never replace a record by one with fewer seeds
        record.write(target)
    return Reproduction(
        recipe_file.name, record, recorded, "", path, {origin["sources"] for origin in origins} != {source_checksum()}
    )


def seeds_of(recorded: Record | None, seeds: int | None, seed: int | None) -> range:
    """Returns the seeds to train: the given ones, those of the record, or 0 to 9; raises ValueError if they are invalid."""
    default_seeds = range(SEEDS) if recorded is None else recorded.seeds
    count = len(default_seeds) if seeds is None else whole("seeds", seeds, most=_MOST_SEEDS)
    first_seed = check_seed(default_seeds[0] if seed is None else seed, count)
    return range(first_seed, first_seed + count)


def _read_old_record(target: Path, recipe_file: Recipe, base: Experiment) -> Record | None:
    """Returns the record of an earlier reproduction; raises RecordError if the file is something else, to protect it."""
    try:
        old_record = Record.read(target) if target.exists() else None
    except RecordError:
        fact = f"{target} is damaged, or not a record of this version"
        raise RecordError(f"{fact}; move it, or choose another folder (--out)") from None
    if old_record is not None:
        settings = {**base.to_json()["config"], **recipe_file.settings}
        if fact := recipes.difference({**old_record.config, **old_record.settings}, settings):
            raise RecordError(f"{target} is {fact}; move the folder {target.parent}, or choose another one (--out)")
    return old_record


def _split_seeds(
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
    earlier_ranges = sorted((int(match[1]), int(match[2]) + 1) for match in parts if match)
    groups, position = list[range](), seeds.start
    while position < seeds.stop:
        if ends := [end for start, end in earlier_ranges if start == position < end <= seeds.stop]:
            groups.append(range(position, ends[-1]))
        else:
            stop = next((start for start, end in earlier_ranges if position < start < end <= seeds.stop), seeds.stop)
            number = math.ceil((stop - position) / at_once)
            bounds = [position + round(i * (stop - position) / number) for i in range(number + 1)]
            groups += [range(low, high) for low, high in itertools.pairwise(bounds)]
        position = groups[-1].stop
    return groups


def _make_record(
    recipe_file: Recipe, results: Sequence[Result], agents: Sequence[BestAgents], origins: Sequence[dict[str, Any]]
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
    last_scores = np.concatenate([np.atleast_1d(r.final(score)) for r in results])
    if np.isnan(last_scores).any():
        seed = seeds[int(np.argmax(np.isnan(last_scores)))]
        raise ValueError(
            f"{recipe_file.name} has no score: seed {seed} ended no episode with a {experiment.rank_by}; train longer"
        )
    best = np.concatenate([best_agents.play(r.experiment, EPISODES) for r, best_agents in zip(results, agents, strict=True)])
    if not np.isfinite([last_scores, best]).all():
        seed = seeds[int(np.argmin(np.isfinite([last_scores, best]).all(0)))]
        raise ValueError(
            f"the scores of {recipe_file.name} are not finite on seed {seed}; fix the environment's rewards or metrics"
        )
    evaluated = np.isfinite(np.reshape(results[0].history["eval_return"], (curves.shape[1], -1))[:, 0]).tolist()
    parts = {"wall": [r.wall_seconds for r in results], "compile": [r.compile_seconds for r in results]}
    parts |= {name.removesuffix("_seconds"): [r.timings[name] for r in results] for name in results[0].timings}
    steps = results[0].history["step"].astype(int).tolist()
    return Record(
        recipe=recipe_file.name,
        settings=dict(recipe_file.settings),
        config=experiment.to_json()["config"],
        steps=steps,
        seeds=seeds,
        returns=[[None if math.isnan(x) else float(f"{x:.6g}") for x in curve] for curve in curves.tolist()],
        last=last_scores.tolist(),
        best=best.tolist(),
        best_steps=np.concatenate([best_agents.steps for best_agents in agents]).astype(int).tolist(),
        evaluations=[step for step, is_evaluated in zip(steps, evaluated, strict=True) if is_evaluated],
        episodes=EPISODES,
        score=experiment.rank_by,
        seconds={name: round(sum(seconds), 1) for name, seconds in parts.items()},
        versions=origins[0]["versions"],
        commit=_join_origins(origins, "commit"),
        date=max(origin["date"] for origin in origins),
        hardware={name: results[0].description["devices"][name] for name in ("platform", "kind", "count")}
        | {"processor": _join_origins(origins, "processor"), "cores": origins[0]["cores"]},
    )


def _seeds(experiment: Experiment) -> range:
    return range(experiment.seed, experiment.seed + experiment.seeds)


def _join_origins(origins: Sequence[dict[str, Any]], name: str) -> str:
    return ", ".join(dict.fromkeys(origin[name] for origin in origins))
