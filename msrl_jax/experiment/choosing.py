"""`policy="auto"`: the synchronous policy whose iterations take the least time, by a short calibration of each.

Policies without staleness and lossy codecs compute the same training run, so the choice changes how long it takes and nothing
else. Every candidate is compiled and runs a few iterations of a state that is thrown away.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from msrl_jax import policies as registry
from msrl_jax._terminal import paragraph, table
from msrl_jax.envs.base import is_on_host
from msrl_jax.experiment.spec import Experiment
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.runtime.memory import is_planned
from msrl_jax.fragments.runtime.timing import Prediction
from msrl_jax.policies.base import described, spec

_CLOSE = 1.1
"""Policies whose predictions are within this factor are not told apart: as much as short measurements vary."""


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A policy that could run the experiment.

    Attributes:
      policy: the policy.
      prediction: what an iteration takes; None if the policy cannot run it.
      compile_seconds: time to compile it.
      refusal: why it cannot run it; empty if it can.
    """

    policy: DistributionPolicy
    prediction: Prediction | None
    compile_seconds: float = 0.0
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The policy with the lowest predicted time, and what the others would take.

    Attributes:
      policy: the policy.
      alternatives: all candidates, the fastest first, then those that cannot run the experiment.
      reason: why, in a sentence.
    """

    policy: DistributionPolicy
    alternatives: tuple[Alternative, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """The choice as plain data, ready for JSON."""

        def row(a: Alternative) -> dict[str, Any]:
            return dataclasses.asdict(a) | {"policy": spec(a.policy)}

        return {"policy": spec(self.policy), "reason": self.reason, "alternatives": [row(a) for a in self.alternatives]}

    def __str__(self) -> str:
        """The reason, and a table of the alternatives."""
        head = ["policy", "ms/iteration", "programs, ms", "transfers, ms", "host, ms", "compile, s"]
        rows = []
        for a in self.alternatives:
            if (p := a.prediction) is not None:
                programs = ", ".join(f"{name} {_short(1e3 * seconds)}" for name, seconds in p.programs.items())
                moved = f"{_short(1e3 * p.transfers)} ({p.exchanges})" if p.exchanges else "-"
                times = [_short(1e3 * p.seconds), programs, moved, _short(1e3 * p.dispatch), f"{a.compile_seconds:.1f}"]
                rows.append([spec(a.policy), *times])
        refused = [line for a in self.alternatives if a.refusal for line in paragraph(f"{spec(a.policy)}: {a.refusal}")]
        return "\n".join([*paragraph(self.reason), *(table(head, rows) if rows else []), *refused])


def choose_policy(
    experiment: Experiment,
    *,
    devices: Sequence[Device] | None = None,
    policies: Sequence[str | DistributionPolicy] | None = None,
    delay: float = 0.0,
    note: Callable[[str], None] = lambda line: None,
) -> Choice:
    """Chooses the policy with the lowest predicted time of an iteration.

    Args:
      experiment: the run.
      devices: the devices for the policies; all if None.
      policies: the candidates; all of the package and of `register` with their defaults if None.
      delay: seconds that a transfer between placements takes longer than here, such as over a network.
      note: called with a line of text before a candidate is measured.

    Returns:
      The choice.

    Raises:
      ValueError: if nothing can be measured: simulators on the host would be stepped, several processes would measure
        different times, planned devices are not there, or no candidate can run the experiment.
    """
    _check_measurable(experiment, devices, delay)
    candidates = [registry.get(p) for p in (registry.names() if policies is None else policies)]
    if not candidates:
        raise ValueError('policy="auto" has no candidate; name at least one policy')
    for policy in candidates:
        if getattr(policy, "staleness", 0):
            raise ValueError(
                f'policy="auto" chooses among policies that compute the same run, and {described(policy)} acts with old '
                "parameters, which changes what is learned; name it as the policy, or leave it out"
            )
    if len(jax.devices() if devices is None else devices) == 1:
        usual = registry.get(experiment.usual_policy)
        return Choice(usual, (Alternative(usual, None),), f"{spec(usual)}: on one device nothing crosses, in one program")
    measured = []
    for policy in candidates:
        note(f"measuring {spec(policy)}")
        measured.append(_measured(experiment, policy, devices, delay))
    known = sorted((a for a in measured if a.prediction), key=_seconds)
    if not known:
        refused = "; ".join(f"{spec(a.policy)}: {a.refusal}" for a in measured)
        raise ValueError(f'policy="auto" found no policy that can run this: {refused}')
    return Choice(known[0].policy, (*known, *(a for a in measured if not a.prediction)), _reason(known, delay))


def is_auto(policy: object) -> bool:
    """Whether a policy is to be chosen; case is ignored, as in the names of policies."""
    return isinstance(policy, str) and policy.lower() == "auto"


def resolved(
    policy: str | DistributionPolicy, experiment: Experiment, devices: Sequence[Device] | None, say: Callable[[str], Any]
) -> DistributionPolicy:
    """The policy itself, or the chosen one if it is "auto"; `say` is called with lines of text about the choice."""
    if not is_auto(policy):
        return registry.get(policy)
    choice = choose_policy(experiment, devices=devices, note=lambda line: say(f"policy auto: {line}"))
    say(f"policy {choice.reason}")
    return choice.policy


def _check_measurable(experiment: Experiment, devices: Sequence[Device] | None, delay: float) -> None:
    name = "name a policy instead"
    if not isinstance(delay, int | float) or isinstance(delay, bool) or not 0 <= delay < float("inf"):
        raise ValueError(f"delay={delay!r} must be a number of seconds of at least 0")
    if is_on_host(experiment.environment):
        raise ValueError(
            f'policy="auto" cannot know how long {experiment.env_name} takes without stepping its simulators, which would not '
            f"be as new afterwards; {name}: {experiment.usual_policy} is usual for simulators on the host"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f'policy="auto" measures in one process, and each of {jax.process_count()} would measure other times; {name}'
        )
    if missing := [d for d in devices or () if is_planned(d)]:
        raise ValueError(f'policy="auto" cannot measure devices that are not there, such as {missing[0]}; {name}')


def _measured(experiment: Experiment, policy: DistributionPolicy, devices: Any, delay: float) -> Alternative:
    try:
        program = experiment.compile(policy, devices)
        prediction = program.predict(experiment.start(program), delay=delay)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return Alternative(policy, None, refusal=str(error).splitlines()[0])
    return Alternative(policy, prediction, program.compile_seconds)


def _seconds(alternative: Alternative) -> float:
    assert alternative.prediction is not None
    return alternative.prediction.seconds


def _short(number: float) -> str:
    """Three digits, or a whole number."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def _reason(known: Sequence[Alternative], delay: float) -> str:
    best, *others = known
    least = _seconds(best)
    more = f", if transfers take {1e3 * delay:g} ms longer" if delay else ""
    text = f"{spec(best.policy)}: {_short(1e3 * least)} ms per iteration{more}"
    if others:
        text += "; " + ", ".join(f"{spec(a.policy)} {_short(_seconds(a) / least)} times as long" for a in others)
    if close := [spec(a.policy) for a in others if _seconds(a) < _CLOSE * least]:
        text += f". A short measurement does not tell it from {' and '.join(close)}"
    return text
