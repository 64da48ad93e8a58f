"""The compiler's own work, in calls of its functions: linear in fragments, and the same for any number of devices."""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from tests.support import toy
from tests.support.slow import mostly_slow


def work(iteration, state, axes, policy, devices):
    """The number of calls of functions of the package while it compiles, without XLA."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and "msrl_jax" in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        msrl.compile(iteration, state, policy=policies.get(policy), axes=axes, devices=devices)
    finally:
        sys.setprofile(before)
    return calls


POLICIES = [
    "GPUOnly",
    "MultiLearner",
    "SingleLearnerCoarse:learners={half}",
    "SingleLearnerFine:learners={half}",
    "Environments:agents={half}",
    "Central:workers={half},shards={half}",
]


EACH_TIME = ("Central:workers={half},shards={half}",)


@pytest.mark.parametrize("policy", mostly_slow(POLICIES, *EACH_TIME))
def test_more_devices_are_hardly_more_work(policy):
    state = toy.initial_state()
    few, many = (work(toy.iteration, state, toy.AXES, policy.format(half=n // 2), jax.devices()[:n]) for n in (4, 8))
    assert few > 1000
    # Devices are looked at one by one in a few places: at 60 calls each, 1,024 devices would double the work of this loop.
    assert many - few <= 4 * 100


def chain(fragments):
    """An iteration of so many fragments, in turn of an actor and of a learner."""
    roles = [("actor", "learner")[k % 2] for k in range(fragments)]
    parts = [msrl.fragment(role=role, name=f"part{k}")(lambda x, k=k: jnp.sin(x) + k) for k, role in enumerate(roles)]

    def iteration(state):
        x = state["x"]
        for part in parts:
            x = part(x)
        return {"x": x}, {}

    return iteration


@pytest.mark.parametrize("policy", mostly_slow(["GPUOnly", "SingleLearnerCoarse", "Central"], "SingleLearnerCoarse"))
def test_work_grows_linearly_with_fragments(policy):
    state, axes = {"x": jnp.zeros(8)}, {"x": P("env")}
    few, more, most = (work(chain(n), state, axes, policy, jax.devices()) for n in (8, 32, 128))
    assert (most - more) / (128 - 32) <= 1.25 * (more - few) / (32 - 8)


def test_work_grows_linearly_with_leaves():
    learners = [msrl.fragment(role=f"learner:{name}", name=name)(lambda xs: [x + 1 for x in xs]) for name in "ab"]

    def iteration(state):
        return [learn(xs) for learn, xs in zip(learners, state, strict=True)], {}

    few, more, most = (work(iteration, [[jnp.zeros(3)] * n] * 2, P(), "GPUOnly", jax.devices()[:1]) for n in (4, 16, 64))
    assert (most - more) / (64 - 16) <= 1.25 * (more - few) / (16 - 4)
