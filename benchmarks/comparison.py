"""Shared by the comparisons with other libraries: settings, alternating timed runs, JSON, and a table in a page of `docs/`.

A peer runs in a separate process, with its own Python. Both processes exist at once; one sleeps while the other trains. Times
exclude initialization, compilation and evaluation.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import jax

import msrl_jax as msrl
from msrl_jax.envs.workers import processors
from msrl_jax.report.bench import calibrated_chunk, interleave, program_runner
from msrl_jax.report.provenance import commit, processor
from msrl_jax.run.prepare import make_experiment


@dataclasses.dataclass(frozen=True)
class Setting:
    """What both libraries train.

    Attributes:
      algo: name of the algorithm, as in msrl_jax.
      env: name of the environment.
      config: fields of both libraries, by the names of msrl_jax's config.
      seeds: runs in one program.
      only_ours: fields that msrl_jax alone has.
    """

    algo: str
    env: str
    config: dict[str, Any]
    seeds: int = 1
    only_ours: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """The algorithm, the environment and the sizes, in one line."""
        config = self.config
        core = f" {config['core']}" if config.get("core") else ""
        label = f"{self.algo}{core} {self.env} {config['num_envs']} x {config['unroll_length']}"
        if "batch_size" in config:
            label += f", {config['num_updates']} x {config['batch_size']}"
        if isinstance(self.config.get("learning_rate"), list | tuple):
            label += f", {len(self.config['learning_rate'])} learning rates"
        return label + f", {self.seeds} seeds" * (self.seeds > 1)


class Labelled(Protocol):
    """A dataclass that has a name in a table."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def label(self) -> str:
        """The name."""
        ...


_S = TypeVar("_S", bound=Labelled)


class Peer:
    """Another library that trains one setting in another process.

    Attributes:
      pid: number of the process.
      about: versions, device, and the time to compile.
    """

    def __init__(self, command: Sequence[str | Path], setting: Labelled):
        """Starts the process, and waits until it has compiled."""
        command = [*command, "--setting", json.dumps(dataclasses.asdict(setting))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.about: dict[str, Any] = self._answer()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: Any) -> None:
        # Closes the input of the process, which then ends, and waits.
        self._process.__exit__(None, None, None)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer's process ended with code {self._process.wait()}; its error is above")
        return json.loads(line)

    def ask(self, request: str | float) -> dict[str, Any]:
        """Sends a line to the process, and returns its answer."""
        assert self._process.stdin is not None
        print(request, file=self._process.stdin, flush=True)
        return self._answer()

    def run(self, seconds: float) -> float:
        """Trains for about `seconds`, and returns environment steps per second."""
        return self.ask(seconds)["steps_per_second"]


def compare(setting: Setting, command: Sequence[str | Path], repeats: int, seconds: float) -> dict[str, Any]:
    """Measures one setting in both libraries.

    Args:
      setting: what to train.
      command: starts the peer's worker.
      repeats: timed runs of each.
      seconds: approximate length of a timed run.

    Returns:
      A row of the record: the setting, medians, all runs, floating-point operations of our program per step, the machine's
      peak, times to compile, the load average before, the cores that other processes kept busy during the timed runs, the
      commit of msrl_jax, and the peer's versions.
    """
    load = os.getloadavg()[0]
    config = setting.config | setting.only_ours
    experiment = make_experiment(setting.algo, setting.env, **config, seeds=setting.seeds)
    program = experiment.compile(msrl.policies.get("GPUOnly"), jax.devices()[:1])
    chunk = calibrated_chunk(experiment, program)
    compile_seconds = program.compile_seconds
    flops = sum(f.flops * f.calls for f in program.explain().fragments if f.depth == 0)
    steps = experiment.steps_per_iteration * experiment.members
    peak = flops_per_second()
    with Peer(command, setting) as peer:
        here, there = jax.devices()[0].device_kind, peer.about["device"]
        if here != there:
            raise RuntimeError(f"msrl_jax trains on {here!r} and the peer on {there!r}; set JAX_PLATFORMS for both")
        runners = [program_runner(experiment, program, chunk), peer]
        start, before = time.perf_counter(), others_seconds(peer.pid)
        ours, theirs = interleave(runners, seconds, repeats)
        after, seconds_of_turns = others_seconds(peer.pid), time.perf_counter() - start
    others = None if before is None or after is None else (after - before) / seconds_of_turns
    return {
        "label": setting.label,
        **dataclasses.asdict(setting),
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "our_runs": ours,
        "their_runs": theirs,
        "flops_per_step": flops / steps,
        "peak_flops": peak,
        "our_compile_seconds": compile_seconds,
        "their_compile_seconds": peer.about["compile_seconds"],
        "load": load,
        "others": others,
        "commit": commit(),
        "peer_versions": peer.about["versions"],
    }


def flops_per_second(size: int = 1024, repeats: int = 10) -> float:
    """The most floating-point operations per second that a product of two matrices of `size` rows and columns reached."""
    x = jax.numpy.ones((size, size))
    product = jax.jit(jax.numpy.matmul).lower(x, x).compile()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(x, x))
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def others_seconds(peer: int) -> float | None:
    """Seconds of processor time of all processes but this one and the peer's; None unless on Linux.

    A virtual machine counts the time that its host gave to others as well.
    """
    if not Path("/proc/stat").exists():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    total = user + nice + system + irq + softirq + steal
    for pid in (os.getpid(), peer):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total -= int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """The processor, the number of cores that this process may use, and JAX's device."""
    return {"cpu": processor(), "cores": processors(), "device": jax.devices()[0].device_kind}


def our_versions() -> dict[str, str]:
    """The versions of msrl_jax and of what it builds on."""
    found = {name: metadata.version(name) for name in ("msrl-jax", "jax", "jaxlib", "flax", "optax", "gymnax")}
    return {"python": platform.python_version()} | found


def merge(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Adds the rows of an earlier record of the same versions and machine to a record.

    Args:
      old: the earlier record, if there is one.
      new: a record with the rows measured now.

    Returns:
      The record with the rows of both; a setting that both have is that of `new`.

    Raises:
      ValueError: if versions, machine or timed runs differ.
    """
    if old is None:
        return new
    for field in sorted(set(old | new) - {"rows"}):
        if old.get(field) != new.get(field):
            raise ValueError(
                f"the earlier record has {field} {old.get(field)} and this one {new.get(field)}, so they are not one table; "
                "delete the earlier record, or write to another file"
            )
    rows = {row["label"]: row for row in [*old["rows"], *new["rows"]]}
    found = {json.dumps(row["peer_versions"]) for row in rows.values()}
    if len(found) > 1:
        raise ValueError(f"the record has rows of several versions of {new['peer']}: {sorted(found)}; delete the old one")
    return new | {"rows": list(rows.values())}


def versions_of(record: Mapping[str, Any], peer: str) -> str:
    """The versions of msrl_jax and of a peer, and of what both build on, in one line."""
    named = {"msrl_jax": record["versions"], peer: record["rows"][0]["peer_versions"]}
    return "; ".join(f"{name}: " + ", ".join(f"{k} {v}" for k, v in found.items()) for name, found in named.items())


def in_turns(
    label: str, turns: Mapping[str, Callable[[int], dict[str, Any]]], seeds: Sequence[int]
) -> dict[str, list[dict[str, Any]]]:
    """The results of functions of a seed for each seed, by name; the order is reversed for every other seed."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
    for number, seed in enumerate(seeds):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            found[name].append({"seed": seed} | turns[name](seed))
            print(label, name, found[name][-1], flush=True)
    return found


def table(record: dict[str, Any]) -> str:
    """A record as Markdown: a table, and a paragraph on versions, machine and load."""
    peer = record["peer"]
    columns = ["setting", "msrl_jax", peer, "ratio", "ratio of each round", "share of peak", "cores of others", "commit"]
    peak = max(row["peak_flops"] for row in record["rows"])  # the best of several measurements: others slow it down
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in record["rows"]:
        ratios = [ours / theirs for ours, theirs in zip(row["our_runs"], row["their_runs"], strict=True)]
        cells = f"{row['ours']:,.0f} | {row['theirs']:,.0f} | {row['ratio']:.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
        others = "-" if row["others"] is None else f"{row['others']:.2f}"
        share = f"{row['ours'] * row['flops_per_step'] / peak:.0%}"
        lines.append(f"| {row['label']} | {cells} | {share} | {others} | {row['commit']} |")
    machine = record["machine"]
    versions = versions_of(record, peer)
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)} of {machine['cpu']}"
    about = f"Medians of {record['repeats']} rounds of {record['seconds']:g} s, on {cores} ({machine['device']}). {versions}."
    return "\n".join([*lines, "", about])


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the least and the greatest value."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def rewrite(page: str, name: str, text: str) -> str:
    """Replaces the part of a page between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.

    Args:
      page: the page.
      name: the name in the markers.
      text: the new part.

    Returns:
      The page with the new part; all else is as it was.

    Raises:
      ValueError: unless the page has each marker once, in this order.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page needs one line {begin!r} and below it one line {end!r}; the table goes between them")
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def chosen(settings: Sequence[_S], only: Sequence[str]) -> list[_S]:
    """The settings whose label contains one of the words; all without words.

    Raises:
      ValueError: if a word is in no label.
    """
    for word in only:
        if not any(word in setting.label for setting in settings):
            raise ValueError(f"no setting has {word!r} in its label; the labels: {'; '.join(s.label for s in settings)}")
    return [setting for setting in settings if not only or any(word in setting.label for word in only)]


def run(
    peer: str,
    description: str | None,
    settings: Sequence[Setting],
    add_arguments: Callable[[argparse.ArgumentParser], Any],
    worker: Callable[[argparse.Namespace], Sequence[str | Path]],
) -> None:
    """Reads the command line, measures, prints, and writes the record and the table.

    Args:
      peer: the peer's name; the markers of the table have it in lower case.
      description: the help of the script.
      settings: what can be measured.
      add_arguments: adds the arguments that find the peer.
      worker: the command that starts the peer's worker.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="measure the settings with a WORD in their label")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each library")
    parser.add_argument("--seconds", type=float, default=1.0, help="approximate length of a timed run")
    parser.add_argument("--json", type=Path, help="write the record here; it keeps rows of the same versions and machine")
    parser.add_argument("--docs", type=Path, help="rewrite the table in this page")
    args = parser.parse_args()
    if args.repeats < 3:
        parser.error(f"--repeats {args.repeats} is too few for a median; use 3 or more")
    if args.docs and not args.json:
        parser.error("--docs needs --json, which holds the numbers of the table")
    try:
        selected = chosen(settings, args.only)
    except ValueError as error:
        parser.error(str(error))
    # On a GPU, each of both processes would take most of the memory. Times to compile are those without a cache.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_enable_compilation_cache", False)
    record: dict[str, Any] = {"peer": peer, "machine": machine(), "versions": our_versions()}
    record |= {"repeats": args.repeats, "seconds": args.seconds, "rows": []}
    if args.json and args.json.exists():
        try:
            record = merge(json.loads(args.json.read_text()), record)
        except ValueError as error:
            parser.error(f"{args.json}: {error}")
    order = [setting.label for setting in settings]
    for setting in selected:
        row = compare(setting, worker(args), args.repeats, args.seconds)
        rates = f"{row['ours']:>12,.0f}{row['theirs']:>12,.0f} steps/s{row['ratio']:>7.2f} x"
        print(f"{setting.label:<48}{rates}", flush=True)
        record = merge(record, record | {"rows": [row]})
        record["rows"] = sorted((r for r in record["rows"] if r["label"] in order), key=lambda r: order.index(r["label"]))
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.docs:
        args.docs.write_text(rewrite(args.docs.read_text(), peer.lower(), table(record)))
    print(table(record), file=sys.stderr)
