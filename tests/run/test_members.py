import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from msrl_jax.run.experiment import members as members_module
from msrl_jax.run.experiment.members import block_size, member_axes
from msrl_jax.run.prepare import make_experiment
from tests.support.random_walk import RandomWalk

ENV = "CartPole-v1:max_steps_in_episode=30"
SMALL = {"num_envs": 8, "unroll_length": 6, "hidden_sizes": (6,), "normalize_observations": True}
PARTICULAR = {
    "a2c": {},
    "a3c": {"num_workers": 4},
    "es": {},
    "impala": {},
    "impala+memory": {"core": "gru:5"},
    "pqn": {"num_epochs": 1, "num_minibatches": 2},
    "recurrent_ppo": {"num_epochs": 1, "num_minibatches": 2, "core.size": 5},
}


def assert_member(members, member, alone):
    """That a member has the history, the parameters and the keys of a run of its own."""
    for name, column in alone.history.items():
        if name not in ("step", "iteration", "seconds", "steps_per_second"):
            mine = members.history[name]  # the age of parameters is that of the run
            mine = mine[:, member] if mine.ndim > 1 else mine
            np.testing.assert_allclose(mine, column, rtol=2e-4, atol=1e-5, err_msg=name)
    of_member = members.member_state(member)
    for (path, x), y in zip(jax.tree.leaves_with_path(of_member.params), jax.tree.leaves(alone.state.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    keys = jax.random.key_data(of_member.actor_keys), jax.random.key_data(alone.state.actor_keys)
    np.testing.assert_array_equal(*keys)


def test_a_member_is_the_run_that_its_seed_gives(members, tiny, one_device):
    alone = msrl.train(
        "ppo", ENV, total_steps=6 * 64, chunk=2, seed=3 + 2, eval_episodes=4, devices=one_device, progress=False, **tiny
    )
    assert_member(members, 2, alone)


@pytest.mark.slow
@pytest.mark.parametrize("algo", PARTICULAR)
def test_members_of_every_algorithm_equal_separate_runs(algo, one_device):
    def train(**seeds):
        return msrl.train(
            algo.partition("+")[0],
            RandomWalk(),
            total_steps=3 * 48,
            chunk=3,
            eval_episodes=0,
            devices=one_device,
            progress=False,
            **seeds,
            **SMALL,
            **PARTICULAR[algo],
        )

    both = train(seed=3, seeds=2)
    assert_member(both, 0, train(seed=3))
    assert_member(both, 1, train(seed=4))


def test_the_history_has_a_column_per_member(members):
    assert members.history["episode_return"].shape == (3, 3)
    assert members.history["step"].shape == (3,)
    np.testing.assert_array_equal(members.history["step"], [128, 256, 384])
    assert len({float(x) for x in members.history["entropy"][-1]}) == 3, "members differ"


@pytest.mark.long
def test_members_split_over_devices_are_the_same_members(members, tiny):
    split = msrl.train(
        "ppo",
        ENV,
        total_steps=6 * 64,
        chunk=2,
        seed=3,
        seeds=3,
        eval_episodes=0,
        devices=jax.devices()[:2],
        progress=False,
        **tiny,
    )
    assert split.summary()["devices"] == 2
    np.testing.assert_allclose(split.history["entropy"], members.history["entropy"], rtol=1e-4, atol=1e-5)


def test_keys_follow_the_seed():
    keys = make_experiment("ppo", ENV, seed=5, seeds=3).key
    for i in range(3):
        np.testing.assert_array_equal(jax.random.key_data(keys[i]), jax.random.key_data(jax.random.key(5 + i)))
    one = make_experiment("ppo", ENV, seed=5).key
    np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(jax.random.key(5)))


def test_the_member_axis_comes_first():
    axes = {"params": P(), "env": P("env"), "obs": (P(None, "env"), None)}
    assert member_axes(axes) == {
        "params": P("member"),
        "env": P("member", "env"),
        "obs": (P("member", None, "env"), P("member")),
    }


def test_members_have_the_keys_of_single_runs():
    last = 2**32 - 1
    experiment = make_experiment("ppo", "CartPole-v1", seed=last - 2, seeds=3)
    for key, seed in zip(experiment.key, (last - 2, last - 1, last), strict=True):
        assert key == jax.random.key(seed) and key.dtype == jax.random.key(seed).dtype


def test_one_cpu_trains_the_same_members_in_blocks(tiny, one_device, monkeypatch):
    def trained(cores):
        monkeypatch.setattr(members_module, "processors", lambda: cores)
        experiment = make_experiment("ppo", ENV, total_steps=2 * 64, seeds=64, learning_rate=[1e-3], **tiny)
        program = experiment.compile(policies.get("GPUOnly"), one_device)
        state, metrics = program.run(experiment.start(program), 2)
        loops = [e.params["length"] for e in program.traced.jaxpr.eqns if e.primitive.name == "scan"]
        return loops, [np.asarray(x) for x in jax.tree.leaves((state.inner.inner.params, metrics))]

    (in_blocks, blocks), (at_once, whole) = trained(1), trained(2)
    assert in_blocks == [2] and 2 not in at_once
    for x, y in zip(blocks, whole, strict=True):  # XLA may add up a block in another order
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("algo", "members", "policy", "num_devices", "block"),
    [
        ("ppo", 128, "GPUOnly", 1, 32),
        ("ppo", 48, "Central", 1, 24),
        ("ppo", 37, "GPUOnly", 1, None),  # 37 is prime
        ("ppo", 32, "GPUOnly", 1, None),
        ("ppo", 128, "GPUOnly", 2, None),
        ("ppo", 128, "SingleLearnerCoarse:actors=1,learners=1,staleness=1", 2, None),
        ("dqn", 128, "GPUOnly", 1, None),  # its buffer would be copied
    ],
)
def test_blocks_are_for_members_on_one_cpu(algo, members, policy, num_devices, block, monkeypatch):
    monkeypatch.setattr(members_module, "processors", lambda: 1)
    agent = make_experiment(algo, ENV).agent
    layout = policies.get(policy).layout(jax.devices()[:num_devices], {"env": 8})
    assert block_size(agent, members, layout) == block
