"""Devices that a policy leaves idle are reported, with remedies that work."""

import re

import jax
import pytest

import msrl_jax as msrl
from msrl_jax.fragments.passes.placed_policy import PlacedPolicy
from msrl_jax.fragments.plan.explain import warn_of_idle
from msrl_jax.policies import Central, Environments, GPUOnly, MultiLearner, SingleLearnerCoarse, SingleLearnerFine
from tests.support import toy


def fit(policy, num_envs, num_devices=8):
    return PlacedPolicy(policy, tuple(jax.devices()[:num_devices]), {"env": [("state.obs", num_envs)]})


IDLE = [
    (SingleLearnerCoarse(), 64, 3, ["num_envs=63", "num_envs=70", "SingleLearnerCoarse(learners=4)"]),
    (SingleLearnerCoarse(actors=3), 48, 4, ["SingleLearnerCoarse(learners=2)"]),
    (SingleLearnerFine(learners=2), 64, 2, ["num_envs=60", "num_envs=66", "SingleLearnerFine(learners=4)"]),
    (Central(), 64, 3, ["num_envs=63", "num_envs=70", "Central(shards=4)"]),
    (GPUOnly(), 60, 2, ["num_envs=56", "num_envs=64"]),
    (GPUOnly(num_devices=2), 64, 6, ["GPUOnly(num_devices=8)"]),
    (MultiLearner(), 9, 5, ["num_envs=8", "num_envs=16"]),
]


@pytest.mark.parametrize(("policy", "num_envs", "idle", "remedies"), IDLE, ids=lambda x: getattr(type(x), "__name__", ""))
def test_idle_devices_are_reported_with_remedies_that_use_them(policy, num_envs, idle, remedies):
    it = fit(policy, num_envs)
    warning = warn_of_idle(it)
    verb, names = "stay" if idle > 1 else "stays", ", ".join(f"cpu:{i}" for i in range(8 - idle, 8))
    assert warning.startswith(f"{idle} of 8 devices {verb} idle ({names}): ")
    found = re.findall(r"num_envs=\d+|\w+\([\w=, ]*\)", warning.partition(". ")[2])
    assert set(remedies) <= set(found)
    for remedy in found:
        if remedy.startswith("num_envs="):
            other = fit(policy, int(remedy.removeprefix("num_envs=")))
        else:
            other = fit(eval(remedy, vars(msrl.policies)), num_envs)
        assert not other.idle and warn_of_idle(other) is None, remedy


@pytest.mark.parametrize("policy", [GPUOnly(), SingleLearnerCoarse(learners=4), Environments(), Central(shards=4)])
def test_there_is_no_warning_if_all_devices_are_used(policy):
    assert fit(policy, 64).idle == () and warn_of_idle(fit(policy, 64)) is None


class Halves:
    """A custom policy without parameters that refuses odd numbers of environments."""

    def layout(self, devices, sizes):
        if sizes["env"] % 2:
            raise ValueError("an even number of environments, please")
        placements = [msrl.policies.Placement.over(name, devices[i : i + 1]) for i, name in enumerate(("a", "b"))]
        return msrl.policies.Layout({"env": placements[0], "learner": placements[1]}, policy="Halves")


def test_without_a_remedy_the_fact_is_stated():
    assert warn_of_idle(fit(Halves(), 6, 3)) == "1 of 3 devices stays idle (cpu:2): Halves uses 2 with num_envs=6"


class Broken(Halves):
    """A custom policy with a bug."""

    def layout(self, devices, sizes):
        if sizes["env"] % 2:
            raise KeyError("odd")
        return super().layout(devices, sizes)


def test_an_error_of_a_policy_is_reported():
    warning = warn_of_idle(fit(Broken(), 6, 3))
    assert warning.endswith("Other numbers were not tried: Halves raises KeyError('odd'); raise ValueError to reject one")


def test_only_sizes_that_all_leaves_share_are_numbers_of_environments():
    it = PlacedPolicy(SingleLearnerCoarse(), tuple(jax.devices()), {"env": [("state.obs", 64), ("state.replay.count", 8)]})
    assert it.sizes == {"env": 8}
    assert warn_of_idle(it) == (
        "3 of 8 devices stay idle (cpu:5, cpu:6, cpu:7): SingleLearnerCoarse() uses 5. SingleLearnerCoarse(learners=4) would "
        "use all 8"
    )


def test_a_plan_lists_idle_devices():
    state = jax.eval_shape(toy.initial_state)
    program = msrl.compile(toy.iteration, state, policy=SingleLearnerCoarse(), axes=toy.AXES, devices=jax.devices()[:4])
    plan = program.explain()
    assert plan.idle == ("cpu:3",) and "; idle = cpu:3" in str(plan) and plan.to_dict()["idle"] == ("cpu:3",)
    assert any(w.startswith("1 of 4 devices stays idle") and "num_envs=15 or num_envs=18" in w for w in plan.warnings)


def test_devices_of_a_role_without_fragments_are_reported(devices):
    policy = msrl.policies.SingleLearnerCoarse(actors=2, buffers=2)
    program = msrl.compile(toy.iteration, toy.initial_state(), policy=policy, axes=toy.AXES, devices=devices[:5])
    (warning,) = [w for w in program.explain().warnings if w.startswith("nothing runs on")]
    assert warning.startswith("nothing runs on buffers[cpu:3, cpu:4]: no fragment has the role 'buffer'.")
