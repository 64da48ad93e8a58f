"""How much a compiled program consists of: where operations are small, a CPU spends its time on starting them."""

import jax
import pytest

from msrl_jax import policies
from msrl_jax.fragments.plan.hlo import module_of
from msrl_jax.run.prepare import make_experiment

STEPS, UPDATES = 128, 16
PPO = {"num_envs": 4, "unroll_length": STEPS, "num_epochs": 4, "num_minibatches": UPDATES // 4, "hidden_sizes": (64, 64)}
# Instructions that only name memory; XLA executes nothing for them.
NAMES = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")


@pytest.fixture(scope="module")
def module():
    """One iteration of PPO."""
    program = make_experiment("ppo", "CartPole-v1", **PPO).compile(policies.GPUOnly(1), jax.devices()[:1])
    (compiled,) = program.compiled()
    return module_of(compiled)


@pytest.mark.long
@pytest.mark.parametrize(("turns", "most"), [(STEPS, 60), (UPDATES, 180)], ids=["step", "update"])
def test_one_turn_of_a_loop_executes_few_instructions(module, turns, most):
    loops = [(made, name) for name in module.computations for made in module.instructions(name) if made.loop]
    bodies = [made.loop[1] for made, around in loops if module.trip_count(made, around) == turns]
    # The two loops of the algorithm; an inner loop over 128 numbers, as XLA's scatter may be, is no step.
    counts = [sum(made.kind not in NAMES for made in module.instructions(body)) for body in bodies]
    assert 20 <= max(counts) <= most, counts


@pytest.mark.long
def test_an_iteration_is_few_computations(module):
    assert len(module.computations) <= 400
