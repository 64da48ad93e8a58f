"""How much a compiled program consists of: where operations are small, a CPU spends its time on starting them."""

import re

import jax
import pytest

from msrl_jax import policies
from msrl_jax.run.prepare import make_experiment

STEPS, UPDATES = 128, 16
PPO = {"num_envs": 4, "unroll_length": STEPS, "num_epochs": 4, "num_minibatches": UPDATES // 4, "hidden_sizes": (64, 64)}
# Instructions that only name memory; XLA executes nothing for them.
NAMES = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")


def computations(text):
    """The instructions of every computation of an HLO module."""
    found, name = {}, None
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = start[1]
        elif line.startswith("}"):
            name = None
        elif name:
            found.setdefault(name, []).append(line)
    return found


def is_executed(instruction):
    return not re.search(rf" ({'|'.join(NAMES)})\(", instruction.split(", metadata=")[0])


@pytest.fixture(scope="module")
def module():
    """The computations of one iteration of PPO."""
    program = make_experiment("ppo", "CartPole-v1", overrides=PPO).compile(policies.GPUOnly(1), jax.devices()[:1])
    (compiled,) = program.compiled()
    return computations(compiled.as_text())


@pytest.mark.long
@pytest.mark.parametrize(("turns", "most"), [(STEPS, 60), (UPDATES, 180)], ids=["step", "update"])
def test_one_turn_of_a_loop_executes_few_instructions(module, turns, most):
    loops = [line for lines in module.values() for line in lines if " while(" in line]
    bodies = [re.search(r"body=%?([\w.-]+)", line)[1] for line in loops if f'"known_trip_count":{{"n":"{turns}"}}' in line]
    # The two loops of the algorithm; an inner loop over 128 numbers, as XLA's scatter may be, is no step.
    counts = [sum(map(is_executed, module[body])) for body in bodies]
    assert 20 <= max(counts) <= most, counts


@pytest.mark.long
def test_an_iteration_is_few_computations(module):
    assert len(module) <= 400
