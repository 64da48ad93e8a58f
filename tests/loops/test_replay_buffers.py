"""Batches from two sources: exact shares, equal runs under all policies, and no data in programs or checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import data, envs, replay
from msrl_jax.algorithms import counted
from msrl_jax.loops.replay_buffers import n_step_buffer, split_batch
from msrl_jax.replay.mixed import mix

G, K, B, ROWS = 4, 3, 24, 8


def random_data(env, rows=400, seed=0):
    """Uniformly random actions in random states of an environment; only reward tells a row."""
    rng, space = np.random.default_rng(seed), env.action_space
    obs = rng.uniform(-0.1, 0.1, (rows + 1, *env.observation_space.shape)).astype(np.float32)
    if isinstance(space, envs.Discrete):
        action = rng.integers(0, space.n, rows)
    else:
        action = rng.uniform(space.low, space.high, (rows, *space.shape)).astype(np.float32)
    ends = rng.uniform(size=rows) < 0.1
    reward = 100 + np.arange(rows)
    return data.Dataset(obs[:-1], action, reward, ends, np.zeros(rows), obs[1:], about={"env": "anywhere"})


CARTPOLE, PENDULUM = envs.make("CartPole-v1"), envs.make("Pendulum-v1")
DQN = {
    "num_envs": 16,
    "unroll_length": 4,
    "num_updates": 2,
    "batch_size": 32,
    "replay.capacity": 512,
    "replay.learning_starts": 64,
    "hidden_sizes": (8,),
    "replay.priorities": "prioritized",
    "replay.n_step": 2,
}


@pytest.fixture(scope="module")
def mixed():
    """Batches of 24 in 4 shards, 8 of them from data whose rewards are 100 and more; the rest has rewards below 50."""
    item = replay.Transition(jnp.zeros(4), jnp.int32(0), jnp.float32(0), jnp.bool_(0), jnp.bool_(0), jnp.zeros(4))
    own = replay.prioritized(
        item, capacity=40, num_envs=8, unroll_length=5, batch_size=B - ROWS, discount=0.9, shards=G, beta=0.7
    )
    items = jax.tree.map(lambda x: jnp.zeros((5, 8, *x.shape), x.dtype), item)

    @jax.jit
    def fill(items):
        state = own.insert(own.init(), items)
        return own.update(state, own.sample(state, jax.random.key(9)).indices, jnp.arange(16.0))

    state = fill(items._replace(reward=jnp.arange(40.0).reshape(5, 8)))
    dataset = dataclasses.replace(random_data(CARTPOLE), action=random_data(CARTPOLE).action.astype(np.int32))
    both = mix(own, *data.buffer(dataset, batch_size=ROWS, discount=0.9, shards=G))
    keys = jax.random.split(jax.random.key(0), K)
    # In the middle of a run: the exponent of the weights has risen halfway to 1.
    of_run = jax.jit(jax.vmap(lambda key: own.sample(state, jax.random.split(key)[0], (), 0.5)))(keys)
    return own, both, state, of_run, jax.jit(jax.vmap(lambda key: both.sample(state, key, both.data, 0.5)))(keys)


def test_every_shard_gives_its_share_of_every_batch(mixed):
    _, _, _, of_run, batches = mixed
    reward = np.asarray(batches.experience.reward).reshape(K, G, B // G)
    np.testing.assert_array_equal(reward[..., :4].reshape(K, -1), of_run.experience.reward)
    given = reward[..., 4:] - 100
    assert (given >= 0).all() and len(np.unique(given)) > K * ROWS // 2
    np.testing.assert_array_equal(given // 100, np.broadcast_to(np.arange(G)[:, None], (K, G, 2)))  # each its own lane


def test_rows_of_the_data_weigh_1_and_others_what_they_would_weigh(mixed):
    _, _, _, of_run, batches = mixed
    weight = np.asarray(batches.weight).reshape(K, G, B // G)
    np.testing.assert_array_equal(weight[..., 4:], 1)
    np.testing.assert_array_equal(weight[..., :4].reshape(K, -1), of_run.weight)
    assert weight.min() < 0.9
    probability = np.asarray(batches.probability).reshape(K, G, B // G)[..., :4].reshape(K, -1)
    np.testing.assert_allclose(of_run.weight, (probability.min(1, keepdims=True) / probability) ** 0.85, rtol=1e-5)


def test_errors_reach_their_own_rows(mixed):
    own, both, state, of_run, batches = mixed
    told = both.update(state, batches.indices, batches.experience.reward)
    alone = own.update(state, of_run.indices, of_run.experience.reward)
    jax.tree.map(np.testing.assert_array_equal, told.priorities, alone.priorities)
    assert (np.asarray(told.priorities.tree[0]) != np.asarray(state.priorities.tree[0])).any()
    assert np.asarray(told.priorities.largest).max() < 50  # rewards of the data are larger


def test_a_buffer_that_mixes_is_a_buffer(mixed):
    own, both, state, *_ = mixed
    assert (both.batch_size, both.shards, both.capacity, both.min_size) == (B, G, own.capacity, own.min_size)
    assert jax.tree.structure(both.init()) == jax.tree.structure(own.init())
    assert both.report(state) == own.report(state)


@pytest.mark.parametrize(
    ("fraction", "shards", "own"), [(0.5, None, 16), (0.25, None, 24), (0.3, None, 24), (0.3, 2, 22), (0.01, 1, None)]
)
def test_the_share_is_rounded_to_rows_of_each_shard(fraction, shards, own):
    config = msrl.algorithms.make(
        msrl.algorithms.DQN, DQN | {"replay.shards": shards, "data": "x.npz", "data_fraction": fraction}
    )
    if own is None:
        with pytest.raises(ValueError, match=r"data_fraction=0.01 of the 32 rows that each of 1 shards .* none to the data"):
            split_batch(config)
    else:
        assert split_batch(config) == (own, 32 - own, shards or 8)


def agent(**changes):
    return counted(
        msrl.algorithms.make(msrl.algorithms.DQN, DQN | {"data": random_data(CARTPOLE)} | changes).build(CARTPOLE), 15
    )


@pytest.fixture(scope="module")
def plain():
    """Five iterations of DQN in plain jit(scan), with the data as an argument."""
    built = agent()
    state = built.with_data(jax.jit(built.init)(jax.random.key(0)))
    after, metrics = jax.jit(lambda s: jax.lax.scan(lambda s, _: built.iteration(s), s, None, length=5))(state)
    return built, state, after, metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options", "devices"),
    [("GPUOnly", {}, 8), ("SingleLearnerCoarse", {"buffers": 2}, 4)]
    + [pytest.param(p, {}, n, marks=pytest.mark.slow) for p in msrl.policies.names() for n in (1, 2, 8)],
)
def test_a_run_is_the_same_under_every_policy(policy, options, devices, plain):
    built, state, after, metrics = plain
    policy = msrl.policies.get(policy, **options)
    program = msrl.compile(built.iteration, state, policy=policy, axes=built.axes, devices=jax.devices()[:devices])
    found, measured = program.run(program.initialize(lambda: built.with_data(built.init(jax.random.key(0)))), 5, chunk=5)
    # With two environments per device, XLA may fuse a multiplication and an addition in one program and not in the other.
    found, after = found.inner, after.inner
    np.testing.assert_allclose(found.obs, after.obs, rtol=0, atol=np.spacing(np.abs(after.obs).max()))
    for a, b in zip(*map(jax.tree.leaves, ((found.params, measured), (after.params, metrics))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (found.data, built.data["data"])), strict=True):
        np.testing.assert_array_equal(a, b)


def test_data_are_no_constant_of_a_program():
    """A program grows with constants in it, as the control does."""

    built = agent(data=random_data(CARTPOLE, 8000))

    def size(bake):
        state = jax.eval_shape(built.init, jax.random.key(0))
        state = state if bake else built.with_data(state)
        iteration = (lambda s: built.iteration(built.with_data(s))) if bake else built.iteration
        return len(jax.jit(iteration).lower(state).as_text())

    assert size(bake=True) > 2 * size(bake=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    data.save(random_data(CARTPOLE), folder / "anywhere.npz")
    options = {"devices": jax.devices()[:1], "progress": False, "eval_episodes": 2, "chunk": 2}
    config = DQN | {"data": str(folder / "anywhere.npz")}
    run = lambda **more: msrl.train("dqn", "CartPole-v1:max_steps_in_episode=9", total_steps=256, **options, **config | more)
    return run, run(out=folder / "run"), folder / "run"


@pytest.mark.slow
def test_members_share_the_data_and_equal_separate_runs(trained, tmp_path):
    run, result, _ = trained
    both = run(seeds=2, out=tmp_path / "run")
    assert both.state.data.items[0].shape == result.state.data.items[0].shape
    assert both.state.replay.items[0].shape == (2, *result.state.replay.items[0].shape)
    for a, b in zip(*map(jax.tree.leaves, (both.member_state(0), result.state)), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert msrl.Result.load(tmp_path / "run").evaluate(2, member=1).returns.shape == (2,)


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_data_actions_are_converted_to_policy_actions(name):
    dataset = random_data(PENDULUM)
    config = msrl.algorithms.get(name)(num_envs=8, batch_size=32, data=dataset, data_fraction=0.25)
    built = config.build(PENDULUM)
    held = jax.tree.map(np.asarray, built.data["data"].items)
    np.testing.assert_allclose(held[1].reshape(400, 1), dataset.action / 2, rtol=1e-6)
    own_rows, data_rows, _ = split_batch(config)
    assert (own_rows, data_rows) == (24, 8) and n_step_buffer(PENDULUM, config).batch_size == 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sac", *(pytest.param(n, marks=pytest.mark.slow) for n in ("td3", "ddpg"))])
def test_actor_critics_learn_from_both(name):
    config = {
        "num_envs": 8,
        "unroll_length": 2,
        "batch_size": 32,
        "replay.capacity": 500,
        "replay.learning_starts": 32,
        "num_updates": 1,
    }
    options = {"devices": jax.devices()[:1], "progress": False, "eval_episodes": 0, "hidden_sizes": (8,), "total_steps": 96}
    result = msrl.train(name, "Pendulum-v1", data=random_data(PENDULUM), **options, **config)
    assert result.history["q"][-1] > 0.5  # rewards of the data are positive, those of the pendulum are not


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": random_data(PENDULUM)}, r"obs of the data set has shape \[3\] .* CartPole-v1"),
        ({"data": "no/such.npz"}, "the file no/such.npz does not exist"),
        ({"data": 5}, "DQN.data=5: use the path of a data set"),
        ({"data_fraction": 1.5}, "data_fraction=1.5"),
        (
            {"data": None, "data_fraction": 0.3},
            "DQN.data_fraction has no effect without a data set; give data='experience.npz'",
        ),
        ({"data": random_data(CARTPOLE, 8)}, "8 rows, 1 in each of shards=8: fewer than batch_size=16 windows of 2 steps"),
        ({"data": random_data(CARTPOLE), "replay.storage": "uint8"}, "cannot store 400 rows of the data set exactly"),
    ],
)
def test_bad_data_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        agent(**change)
