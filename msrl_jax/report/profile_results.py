"""A profile: the training time by phase and by fragment, as in RL-Scope (Gleeson et al., MLSys 2021)."""

import dataclasses
import gzip
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl_jax._files import as_path, parse_json, replacing
from msrl_jax.fragments.support.terminal import table
from msrl_jax.report.curves import figure_of, inline, styled, svg_of
from msrl_jax.report.timeline import Key, Span, in_perfetto
from msrl_jax.run.disk.folder import check_target, write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES = (
    "simulation",
    "inference",
    "learning",
    "replay",
    "others",
    "transfer",
    "Python",
    "idle",
    "outside of fragments",
    "not attributed",
)
"""The phases of time. The last two are operations of the loop itself, and those of unknown origin."""

_LARGE = 0.15  # above this error, a profile is unreliable

OF_RUN = "profile.json"
"""The file of a profile in the folder of a run."""


@dataclasses.dataclass(frozen=True)
class FragmentTime:
    """The time of a fragment in a phase, per iteration; the fragment is empty for time without one, such as idle time."""

    phase: str  # one of PHASES
    fragment: str
    seconds: float
    operations: float  # number of XLA operations for it, on all devices


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time of an iteration by phase and fragment: `str` is a table, `save` writes a figure or the trace.

    Attributes:
      title: a description of the run.
      policy: the policy and the devices.
      seconds: time of an iteration without a trace, the median of the runs.
      parts: the time of every fragment, without the overhead of tracing.
      iterations: iterations of each run.
      overhead: the overhead of tracing, as a fraction of the time without it.
      error: relative difference of the sum of `parts` from the time without a trace: 0.02 means 2% more.
      events: the events of the run that is shown, with phases and fragments; empty if the profile was read from a file.
    """

    title: str
    policy: str
    seconds: float
    parts: tuple[FragmentTime, ...]
    iterations: int
    overhead: float
    error: float
    events: tuple[tuple[Span, Key | None], ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of an iteration by phase, in the order of `PHASES`."""
        totals = {phase: sum(part.seconds for part in self.parts if part.phase == phase) for phase in PHASES}
        return {phase: seconds for phase, seconds in totals.items() if seconds > 0}

    @property
    def shares(self) -> dict[str, float]:
        """The phases as fractions of the total time."""
        total = sum(self.phases.values())
        return {phase: seconds / total for phase, seconds in self.phases.items()}

    def __str__(self) -> str:
        sums = f"{abs(self.error):.1%} {'more' if self.error > 0 else 'less'}"
        head = (
            f"{self.title}, {self.policy}: {_format_time(self.seconds)} an iteration; tracing took {self.overhead:.0%} more, "
            f"which is subtracted; the rest sums to {sums} than without a trace"
        )
        if abs(self.error) > _LARGE:
            head += ". That is a large error: the machine may do other work. Measure again, with more repeats or iterations"
        total, rows = sum(self.phases.values()), []
        for phase, seconds in self.phases.items():
            parts = [part for part in self.parts if part.phase == phase]
            rows.append(
                [phase, _format_time(seconds), f"{seconds / total:.1%}", _format_count(sum(p.operations for p in parts))]
            )
            for part in parts if parts[0].fragment else ():
                share = f"{part.seconds / total:.1%}"
                rows.append([f"  {part.fragment}", _format_time(part.seconds), share, _format_count(part.operations)])
        return "\n".join([head, *table(["phase", "time", "share", "operations"], rows)])

    def _repr_html_(self) -> str:
        return f"<figure>{inline(svg_of(profiles_figure({'': self})))}</figure>"

    def to_dict(self) -> dict[str, Any]:
        """Returns the profile as plain data, without its events."""
        fields = dataclasses.asdict(dataclasses.replace(self, events=()))
        del fields["events"]
        return fields | {"phases": self.phases, "shares": self.shares}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Profile":
        """Makes a profile from the output of `to_dict`."""
        names = [field.name for field in dataclasses.fields(cls) if field.name not in ("parts", "events")]
        fields: dict[str, Any] = {name: data[name] for name in names}
        loaded = cls(parts=tuple(FragmentTime(**part) for part in data["parts"]), **fields)
        numbers = [loaded.seconds, loaded.overhead, loaded.error]
        numbers += [number for part in loaded.parts for number in (part.seconds, part.operations)]
        phases = {part.phase for part in loaded.parts}
        if not phases or not phases <= {*PHASES} or not all(math.isfinite(number) for number in numbers):
            raise ValueError("its times of phases are invalid")
        return loaded

    def save(self, path: str | os.PathLike) -> Path:
        """Writes the profile to a file.

        Args:
          path: `.svg` for a figure, `.json` for the numbers, `.trace.json.gz` for a trace that https://ui.perfetto.dev opens.

        Returns:
          The file's path.
        """
        target = as_path("path", path)
        check_profile(target)
        if target.name.lower().endswith(".trace.json.gz"):
            if not self.events:
                raise ValueError("this profile was read from a file, which has no trace; make it again to write one")
            text = json.dumps(in_perfetto(self.events))
            with replacing(target) as partial:
                partial.write_bytes(gzip.compress(text.encode(), 6, mtime=0))
        elif target.suffix.lower() == ".svg":
            write_text(target, svg_of(profiles_figure({"": self})))
        else:
            write_json(target, self.to_dict())
        return target


def check_profile(path: Path) -> None:
    """Raises ValueError if a profile cannot be written to the path; call it before profiling."""
    check_target("profile", path, (".gz",) if path.name.lower().endswith(".trace.json.gz") else (".svg", ".json"))


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _format_count(number: float) -> str:
    return f"{number:,.0f}" if number else ""


def profiles_figure(profiles: Mapping[str, Profile]) -> "Figure":
    """Draws a named bar for each profile: the share of every phase, and the time of an iteration."""
    with styled():
        figure, (panel,) = figure_of(1)
        figure.set_size_inches(7, 1.3 + 0.45 * len(profiles))
        lefts = dict.fromkeys(profiles, 0.0)
        for number, phase in enumerate(PHASES):
            widths = [100 * profile.shares.get(phase, 0.0) for profile in profiles.values()]
            if not any(widths):
                continue
            grey = {"idle": "0.85", "outside of fragments": "0.6", "not attributed": "0.4"}.get(phase)
            panel.barh(list(profiles), widths, left=list(lefts.values()), label=phase, color=grey or f"C{number}")
            lefts = {name: start + width for (name, start), width in zip(lefts.items(), widths, strict=True)}
        for name, profile in profiles.items():
            panel.text(101, name, _format_time(profile.seconds), va="center", fontsize=8)
        panel.set(xlabel="% of the time of an iteration", xlim=(0, 113), xticks=range(0, 101, 20))
        panel.invert_yaxis()
        figure.legend(*panel.get_legend_handles_labels(), fontsize=8, ncols=5, loc="outside upper center")
        return figure


def profile_of(folder: Path) -> Profile | None:
    """Returns the profile in the folder of a run, if any.

    Raises:
      ValueError: if the profile is damaged.
    """
    file = folder / OF_RUN
    if not file.exists():
        return None
    try:
        return Profile.from_dict(parse_json(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the profile {file} is damaged ({error}); remove it, or make it again: msrl-jax profile") from error
