"""Implements `policy="auto"`: calibrates each candidate briefly, and chooses the synchronous policy with the fastest iteration.

Policies without staleness and lossy codecs perform the same computation: the choice changes how long training takes, and
changes numbers only by float rounding. Every candidate is compiled, and runs a few iterations on a state that is discarded.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from msrl_jax import policies as registry
from msrl_jax.envs.base import is_on_host
from msrl_jax.fragments import codecs
from msrl_jax.fragments.measure import predict
from msrl_jax.fragments.passes.placed_policy import check_devices
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.runtime.memory import is_planned
from msrl_jax.fragments.runtime.timing import Prediction, check_delay
from msrl_jax.fragments.support.terminal import paragraph, table
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.policies.helpers import policy_text
from msrl_jax.run.experiment.experiment import Experiment

_CLOSE = 1.1
"""Policies whose predictions are within this factor are not told apart; on a busy machine measurements vary by more."""


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A policy that could run the experiment.

    Attributes:
      policy: the policy.
      prediction: the predicted time of an iteration; None if the policy cannot run the experiment.
      compile_seconds: time to compile the program.
      refusal: why the policy cannot run the experiment; empty if it can.
    """

    policy: DistributionPolicy
    prediction: Prediction | None
    compile_seconds: float = 0.0
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The policy with the lowest predicted time, and the predictions for the others.

    Attributes:
      policy: the policy.
      alternatives: all candidates: the fastest first, and those that cannot run the experiment last.
      reason: the reason for the choice, as a sentence.
    """

    policy: DistributionPolicy
    alternatives: tuple[Alternative, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the choice as plain data, ready for JSON."""

        def row(a: Alternative) -> dict[str, Any]:
            return dataclasses.asdict(a) | {"policy": policy_text(a.policy)}

        return {"policy": policy_text(self.policy), "reason": self.reason, "alternatives": [row(a) for a in self.alternatives]}

    def __str__(self) -> str:
        """Returns the reason, and a table of the alternatives."""
        head = ["policy", "ms/iteration", "programs, ms", "transfers, ms", "host, ms", "compile, s"]
        rows = []
        for a in self.alternatives:
            if (p := a.prediction) is not None:
                programs = ", ".join(f"{name} {_format_number(1e3 * seconds)}" for name, seconds in p.programs.items())
                moved = f"{_format_number(1e3 * p.transfers)} ({p.exchanges})" if p.exchanges else "-"
                times = [
                    _format_number(1e3 * p.seconds),
                    programs,
                    moved,
                    _format_number(1e3 * p.dispatch),
                    f"{a.compile_seconds:.1f}",
                ]
                rows.append([policy_text(a.policy), *times])
        refusals = [line for a in self.alternatives if a.refusal for line in paragraph(f"{policy_text(a.policy)}: {a.refusal}")]
        return "\n".join([*paragraph(self.reason), *(table(head, rows) if rows else []), *refusals])


@entry
def choose_policy(
    experiment: Experiment,
    *,
    devices: Sequence[Device] | None = None,
    policies: Sequence[str | DistributionPolicy] | None = None,
    delay: float = 0.0,
    note: Callable[[str], None] = lambda line: None,
) -> Choice:
    """Chooses the policy with the lowest predicted time per iteration.

    Candidates that cannot run the experiment are listed with the reason, and so are those that would change what is learned
    (by staleness, or by a codec that loses precision).

    Args:
      experiment: the experiment to run.
      devices: the devices for the policies; None uses all.
      policies: the candidates; None takes all policies of the package and of `register` that need no parameters. On one device,
        candidates are measured only if you pass them, because nothing is transferred between devices.
      delay: extra seconds per transfer between placements compared with this machine, for example over a network. Collectives
        inside programs are assumed to take as long as here.
      note: called with a line of text before each candidate is measured; an exception from it stops the measurement.

    Returns:
      The chosen policy, with the alternatives.

    Raises:
      ValueError: if nothing can be measured: the host simulates the environment, several processes would measure different
        times, the devices are only planned, or no candidate can run the experiment.
    """
    if not isinstance(experiment, Experiment) or isinstance(policies, str):
        raise TypeError('choose_policy takes an Experiment, and policies as a list: ["GPUOnly", "Central"]')
    check_delay(delay)
    _check_measurable(experiment, devices)
    candidates = _candidates() if policies is None else list(map(registry.get, policies))
    if not candidates:
        raise ValueError('policy="auto" has no candidate; name at least one policy')
    if policies is None and len(jax.devices() if devices is None else devices) == 1:
        usual = registry.get(experiment.usual_policy)
        return Choice(usual, (Alternative(usual, None),), f"{policy_text(usual)}: one device needs one program")
    alternatives = []
    for policy in {policy_text(p): p for p in candidates}.values():
        note(f"measuring {policy_text(policy)}")
        alternatives.append(_measure(experiment, policy, devices, delay))
    runnable = sorted((a for a in alternatives if a.prediction), key=_predicted_seconds)
    if not runnable:
        refusals = "; ".join(f"{policy_text(a.policy)}: {a.refusal}" for a in alternatives)
        raise ValueError(f'policy="auto" found no policy that can run this: {refusals}')
    return Choice(
        runnable[0].policy, (*runnable, *(a for a in alternatives if not a.prediction)), _explain_choice(runnable, delay)
    )


def is_auto(policy: object) -> bool:
    """Returns whether a policy is to be chosen automatically; ignores case, as names of policies do."""
    return isinstance(policy, str) and policy.lower() == "auto"


def resolve_policy(
    policy: str | DistributionPolicy,
    experiment: Experiment,
    devices: Sequence[Device] | None,
    say: Callable[[str], object],
    stop: Callable[[], str],
) -> DistributionPolicy:
    """Returns the policy itself, or the chosen one if it is "auto".

    `say` is called with lines of text about the choice. If `stop` returns a reason, KeyboardInterrupt ends the measurement.
    """
    if not is_auto(policy):
        return registry.get(policy)

    def note(line: str) -> None:
        if reason := stop():
            raise KeyboardInterrupt(f"{reason}, while a policy was chosen, so nothing was trained")
        say(f"policy auto: {line}")

    choice = choose_policy(experiment, devices=devices, note=note)
    say(f"policy {choice.reason}")
    return choice.policy


def _candidates() -> list[DistributionPolicy]:
    """Returns the registered policies that need no parameters."""
    candidates = []
    for name in registry.names():
        parameters = inspect.signature(registry.POLICIES[name]).parameters.values()
        if all(p.default is not p.empty for p in parameters):
            candidates.append(registry.get(name))
    return candidates


def _check_measurable(experiment: Experiment, devices: Sequence[Device] | None) -> None:
    remedy = "name a policy instead"
    checked_devices = () if devices is None else check_devices(devices)
    if is_on_host(experiment.environment):
        raise ValueError(
            f'policy="auto" does not support {experiment.env_name}: measuring would step its simulators on the host and so '
            f"change the run; {remedy}, such as {experiment.usual_policy}, the default for simulators on the host"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f'policy="auto" needs a single process, because each of {jax.process_count()} would measure different times; '
            f"{remedy}"
        )
    if planned := [d for d in checked_devices if is_planned(d)]:
        raise ValueError(f'policy="auto" cannot measure planned devices, such as {planned[0]}; {remedy}')


def _measure(experiment: Experiment, policy: DistributionPolicy, devices: Sequence[Device] | None, delay: float) -> Alternative:
    try:
        program = experiment.compile(policy, devices)
        if program.layout.staleness or not all(codecs.get(edge.codec).lossless for edge in program.layout.codecs):
            effect = "acts with old parameters" if program.layout.staleness else "has a codec that loses precision"
            return Alternative(policy, None, refusal=f"it {effect}, which changes what is learned; name it as the policy")
        prediction = predict(program, experiment.start(program), delay=delay)
    except Exception as error:  # any policy, also a custom one, may raise anything
        return Alternative(policy, None, refusal=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return Alternative(policy, prediction, program.compile_seconds)


def _predicted_seconds(alternative: Alternative) -> float:
    assert alternative.prediction is not None
    return alternative.prediction.seconds


def _format_number(number: float) -> str:
    """Formats a number with three digits, or as a whole number."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def _explain_choice(runnable: Sequence[Alternative], delay: float) -> str:
    best, *slower = runnable
    best_seconds = _predicted_seconds(best)
    condition = f", if transfers take {1e3 * delay:g} ms longer" if delay else ""
    text = f"{policy_text(best.policy)}: {_format_number(1e3 * best_seconds)} ms per iteration{condition}"
    if slower:
        text += "; " + ", ".join(
            f"{policy_text(a.policy)} {_format_number(_predicted_seconds(a) / best_seconds)} times as long" for a in slower
        )
    if close := [policy_text(a.policy) for a in slower if _predicted_seconds(a) < _CLOSE * best_seconds]:
        text += f". A short measurement does not tell it from {' and '.join(close)}"
    return text
