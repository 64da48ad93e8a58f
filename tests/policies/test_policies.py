"""How each policy divides devices; a custom policy is a class of a few lines."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.policies import (
    POLICIES,
    Central,
    Environments,
    GPUOnly,
    Layout,
    MultiLearner,
    Placement,
    SingleLearnerCoarse,
    SingleLearnerFine,
)
from msrl_jax.policies.helpers import divide_devices, policy_repr, policy_text


def counts(policy, num_devices, **sizes):
    layout = policy.layout(jax.devices()[:num_devices], sizes)
    return {p.name: len(p.devices) for p in layout.placements}


@pytest.mark.parametrize(
    ("policy", "num_devices", "sizes", "expected"),
    [
        (GPUOnly(), 8, {"env": 64}, {"all": 8}),
        (GPUOnly(), 8, {"env": 12}, {"all": 6}),  # the most that divide the environments
        (GPUOnly(num_devices=2), 8, {"env": 64}, {"all": 2}),
        (MultiLearner(), 4, {"env": 64}, {"actors": 4, "learners": 4}),
        (SingleLearnerCoarse(), 8, {"env": 64}, {"actors": 4, "learners": 1}),
        (SingleLearnerCoarse(), 8, {"env": 63}, {"actors": 7, "learners": 1}),
        (SingleLearnerCoarse(learners=4), 8, {"env": 64}, {"actors": 4, "learners": 4}),
        (SingleLearnerCoarse(), 8, {"env": 64, "shard": 2}, {"actors": 4, "learners": 1}),
        (SingleLearnerCoarse(buffers=2), 8, {"env": 64, "shard": 2}, {"actors": 4, "learners": 1, "buffers": 2}),
        (SingleLearnerCoarse(buffers="actors"), 8, {"env": 64, "shard": 2}, {"actors": 2, "learners": 1}),  # divide both
        (SingleLearnerFine(envs=2, learners=2), 8, {"env": 64}, {"envs": 2, "learners": 2}),
        (Environments(), 8, {"env": 64}, {"envs": 4, "agents": 4}),
        (Environments(), 8, {"env": 64, "agent": 3}, {"envs": 4, "agents": 3}),
        (Environments(agents=2), 8, {"env": 64}, {"envs": 4, "agents": 2}),
        (Environments(envs=2), 8, {"env": 64}, {"envs": 2, "agents": 4}),
        (Central(), 8, {"env": 64}, {"workers": 4, "server": 1}),
        (Central(shards=4), 8, {"env": 64}, {"workers": 4, "server": 4}),
    ],
)
def test_devices_are_divided(policy, num_devices, sizes, expected):
    assert counts(policy, num_devices, **sizes) == expected


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_one_device_holds_everything(name):
    assert set(counts(msrl.policies.get(name), 1, env=8).values()) == {1}


@pytest.mark.parametrize("name", sorted(n for n in POLICIES if n not in ("GPUOnly", "MultiLearner")))
def test_parts_share_no_device_if_there_are_two(name):
    layout = msrl.policies.get(name).layout(jax.devices()[:2], {"env": 8})
    used = [d for p in layout.placements for d in p.devices]
    assert len(used) == len(set(used)) == 2


@pytest.mark.parametrize("policy", [SingleLearnerCoarse, SingleLearnerFine, Environments])
def test_environments_may_run_on_another_platform(policy):
    """The other platform is the CPU here, which the learner uses too, so the parts share devices."""
    layout = policy(env_platform="cpu").layout(jax.devices()[:2], {"env": 8})
    assert {d.platform for d in layout.placement("env", "env").devices} == {"cpu"}
    assert len(layout.placement("env", "env").devices) == 8
    with pytest.raises(ValueError, match="env_platform='tpu'"):
        policy(env_platform="tpu").layout(jax.devices(), {"env": 8})


def test_a_sharded_server_keeps_a_part_of_every_large_tensor():
    server = Central(shards=4).layout(jax.devices(), {"env": 8}).placement("server", "apply")
    assert server.sharding(P(), (64, 128)).spec == P(None, "devices")  # the largest dimension that divides
    assert server.sharding(P(), (6, 8)).spec == P(None, "devices")
    assert server.sharding(P(), (3,)).spec == P()  # too small to split: whole on every shard
    assert server.sharding(P(), ()).spec == P()


def test_agents_are_split_along_their_axis_first():
    agents = Environments(envs=4, agents=2).layout(jax.devices(), {"env": 8, "agent": 2}).placement("learner", "learn")
    assert agents.sharding(P("env", "agent"), (8, 2)).spec == P(None, "devices")
    assert agents.sharding(P("env"), (8, 2)).spec == P("devices")


def test_devices_split_what_their_role_has_and_agents_and_members_too():
    layout = SingleLearnerCoarse(actors=2, learners=2, buffers=2).layout(jax.devices(), {"env": 8})
    for role, own in (("actor", "worker"), ("learner", "worker"), ("buffer", "shard")):
        placement = layout.placement(role, role)
        for axis in ("env", own, "agent", "member"):
            assert placement.sharding(P(None, axis), (3, 4)).spec == P(None, "devices"), (role, axis)
    assert layout.placement("learner", "learn").sharding(P("shard"), (4,)).spec == P()  # a sample lies where it is drawn


def test_codecs_lie_on_the_way_that_they_are_named_after():
    policy = SingleLearnerCoarse(actors=2, buffers=2, trajectory_codec="bfloat16", parameter_codec="uint8")
    edges = policy.layout(jax.devices(), {"env": 8}).codecs
    assert [(e.source, e.destination, str(e.codec)) for e in edges] == [
        ("actors", "buffers", "bfloat16"),
        ("buffers", "learners", "bfloat16"),
        ("learners", "actors", "uint8"),
    ]


def test_case_of_names_is_ignored():
    assert msrl.policies.get("gpuonly") == GPUOnly()
    assert msrl.policies.get("CENTRAL", shards=2) == Central(shards=2)


@dataclass(frozen=True)
class BufferApart:
    """A custom policy: replay on a separate device, everything else together."""

    def layout(self, devices, sizes):
        rest, buffer = Placement.over("rest", devices[:-1]), Placement.over("buffer", devices[-1:])
        return Layout({"env": rest, "actor": rest, "learner": rest, "buffer": buffer}, policy="BufferApart()")


def test_a_policy_of_ones_own():
    @msrl.fragment(role="buffer")
    def store(buffer, rows):
        buffer = jnp.roll(buffer, -rows.shape[0], 0).at[-rows.shape[0] :].set(rows)
        return buffer, buffer[::2].mean(0)

    @msrl.fragment(role="learner")
    def fit(w, batch):
        return w + 0.1 * batch

    @msrl.fragment(role="env")
    def act(x, w):
        return jnp.tanh(x + w)

    def iteration(state):
        x, w, buffer = state
        x = act(x, w)
        buffer, batch = store(buffer, x[:4])
        return (x, fit(w, batch), buffer), {"w": w.sum()}

    state = jnp.ones((4, 3)), jnp.zeros(3), jnp.zeros((8, 3))
    program = msrl.compile(iteration, state, policy=BufferApart(), axes=(P("env"), P(), P()), devices=jax.devices()[:3])
    (_, w, buffer), _ = program.run(state, 4)
    assert {d.id for d in buffer.sharding.device_set} == {2}
    assert [c.value for c in program.explain().crossings] == ["act()", "store()[1]"]
    expected, step = state, jax.jit(iteration)
    for _ in range(4):
        expected, _ = step(expected)
    np.testing.assert_allclose(w, expected[1], rtol=1e-6)
    np.testing.assert_allclose(buffer, expected[2], rtol=1e-6)


class Keeping:
    """A policy that is no dataclass."""

    def __init__(self, keep=1, last=False):
        self.keep, self.last = keep, last

    def layout(self, devices, sizes): ...


class Hiding(Keeping):
    """One whose parameter cannot be read."""

    def __init__(self, hidden=1):
        super().__init__(hidden)


def test_the_text_of_a_custom_policy_has_its_parameters():
    assert (policy_text(Keeping()), policy_text(Keeping(2, last=True))) == (
        f"{__name__}:Keeping",
        f"{__name__}:Keeping:keep=2,last=True",
    )
    assert policy_repr(Keeping(2)) == "Keeping(keep=2)"
    with pytest.raises(ValueError, match=r"Hiding has the parameter 'hidden', but no attribute .* frozen dataclass"):
        policy_text(Hiding(2))


def test_unknown_policies_and_parameters_suggest_the_nearest():
    with pytest.raises(ValueError, match=r"unknown policy 'SingleLearnerCourse' \(did you mean 'SingleLearnerCoarse'"):
        msrl.policies.get("SingleLearnerCourse")
    with pytest.raises(ValueError, match=r"has no parameter 'learner' \(did you mean 'learners'"):
        msrl.policies.get("SingleLearnerCoarse", learner=2)
    with pytest.raises(TypeError, match="is not a distribution policy"):
        msrl.policies.get(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"is not a distribution policy: make one, GPUOnly\(\)"):
        msrl.policies.get(msrl.policies.GPUOnly)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'mine\.py' is a file; write mine:NAME"):
        msrl.policies.get("mine.py")


def test_parameters_are_given_as_text_or_by_keyword():
    wanted = msrl.policies.SingleLearnerCoarse(learners=2, staleness=1)
    assert msrl.policies.get("singlelearnercoarse:learners=2,staleness=1") == wanted
    assert msrl.policies.get("SingleLearnerCoarse:learners=4,staleness=1", learners=2) == wanted


@pytest.mark.parametrize("count", [0, -1, True, "2", 1.5])
def test_a_custom_policy_divides_devices_by_whole_numbers_only(count):
    devices = jax.devices()
    with pytest.raises(ValueError, match=r": parts=.*: use an integer of at least 1"):
        divide_devices(devices, {"parts": count}, {}, object())
    assert divide_devices(devices, {"parts": 2.0}, {}, object())["parts"] == devices[:2]
