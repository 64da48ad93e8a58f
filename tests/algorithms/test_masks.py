"""Algorithms on an environment with legal actions: they take no other ones, and learn what the formulas say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import data, envs
from msrl_jax.envs.masks import only_legal
from msrl_jax.losses.entropy import soft_value
from msrl_jax.networks.discrete_policies import AllActions
from msrl_jax.networks.q_network import greedy_target
from msrl_jax.nonfinite.failure import Failure
from msrl_jax.nonfinite.origin import find_origin
from msrl_jax.run.evaluation.evaluate import make_evaluator
from tests.support.maze import LEFT, RIGHT, Maze, MazeState, legal
from tests.support.off_policy import B, adam, build, counting, drawn, one, start, wide
from tests.support.slow import mostly_slow

SMALL = {"num_envs": 8, "unroll_length": 8, "hidden_sizes": (8,)}
REPLAY = SMALL | {"batch_size": 16, "replay.capacity": 512, "replay.learning_starts": 128, "num_updates": 2}
MEMORY = {"core.size": 8}
CONFIGS = {
    "ppo": SMALL | {"num_epochs": 2, "num_minibatches": 2, "normalize_observations": True},
    "recurrent_ppo": SMALL | MEMORY | {"num_epochs": 1, "num_minibatches": 2},
    "a2c": SMALL,
    "a3c": SMALL | {"num_workers": 2},
    "impala": SMALL | {"replay_batches": 2, "num_updates": 2},
    "a3c+memory": SMALL | MEMORY | {"num_workers": 2, "core": "gru"},
    "pqn": SMALL | {"num_epochs": 2, "num_minibatches": 2, "exploration.steps": 500},
    "dqn": REPLAY | {"dueling": True, "replay.n_step": 2, "replay.storage": "uint8", "exploration.steps": 500},
    "dqn+c51": REPLAY | {"returns": "c51:num_atoms=5", "exploration.steps": 500},
    "apex_dqn": REPLAY,
    "r2d2": REPLAY | MEMORY | {"burn_in": 2, "trace_length": 4, "replay.n_step": 2, "exploration.steps": 500},
    "muzero": REPLAY | {"num_simulations": 4, "model_steps": 2, "replay.n_step": 2, "latent_size": 8, "random_share": 0.1},
    "sac": REPLAY,
    "sac+gru": REPLAY | MEMORY | {"core": "gru", "burn_in": 2, "trace_length": 4, "replay.n_step": 2},
    "es": SMALL | {"unroll_length": 16},
}
OFFLINE = {"bc": {}, "cql": {}, "iql": {}, "dqn+data": REPLAY}
TOGETHER, APART = ("GPUOnly", 1), ("SingleLearnerCoarse:actors=2,learners=2", 4)


@functools.cache
def trained(algo, policy=TOGETHER, record=None):
    """A run of twenty iterations on the maze."""
    config = CONFIGS[algo]
    return msrl.train(
        algo.partition("+")[0],
        Maze(),
        policy=policy[0],
        devices=jax.devices()[: policy[1]],
        eval_episodes=0,
        progress=False,
        total_steps=20 * config["num_envs"] * config["unroll_length"],
        chunk=10,
        record=record,
        **config,
    )


@pytest.fixture(scope="module", autouse=True)
def run_of_ppo(tmp_path_factory):
    """A run of PPO that records its steps."""
    path = tmp_path_factory.mktemp("run") / "run.npz"
    return trained("ppo", TOGETHER, path), path


def maze_of(state):
    is_maze = lambda x: isinstance(x, MazeState)
    (maze,) = (x for x in jax.tree.leaves(state, is_leaf=is_maze) if is_maze(x))
    return maze


def assert_legal(dataset):
    """All actions are legal where they were taken; the masks are those of the observations."""
    for obs, mask in ((dataset.obs, dataset.action_mask), (dataset.next_obs, dataset.next_action_mask)):
        np.testing.assert_array_equal(mask, legal(obs[:, 0].astype(int), 4))
        assert not obs[:, 1].any()
    assert dataset.action_mask[np.arange(len(dataset)), dataset.action].all()


@pytest.mark.parametrize("algo", mostly_slow(CONFIGS, "ppo"))  # the references of DQN and SAC run them too
def test_no_illegal_action_is_taken_in_training_evaluation_or_recording(algo, run_of_ppo):
    result = run_of_ppo[0] if algo == "ppo" else trained(algo)
    assert not maze_of(result.state).broken.any() and not np.asarray(result.state.obs.obs)[:, 1].any()
    assert result.evaluate(32).finished.all()
    assert_legal(data.record(result, 400, epsilon=0.5, num_envs=8))
    if algo in ("recurrent_ppo", "sac", "sac+gru"):
        assert_legal(data.record(result, 400, num_envs=8))


def test_a_recorded_run_keeps_the_legal_actions(run_of_ppo):
    dataset = data.load(run_of_ppo[1])
    assert len(dataset) == 20 * 64
    assert_legal(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("algo", OFFLINE)
def test_no_illegal_action_is_taken_after_learning_from_data(algo, run_of_ppo):
    dataset = data.load(run_of_ppo[1])
    settings = {"hidden_sizes": (8,), "batch_size": 32} | OFFLINE[algo]
    result = msrl.train(
        algo.partition("+")[0],
        Maze(),
        data=dataset,
        policy="GPUOnly:num_devices=1",
        total_steps=1000,
        eval_episodes=0,
        progress=False,
        **settings,
    )
    assert result.evaluate(32).finished.all()


@pytest.mark.parametrize("name", ["rows.npz", "rows.parquet"])
def test_data_sets_keep_the_legal_actions(name, run_of_ppo, tmp_path):
    dataset = data.load(run_of_ppo[1])
    again = data.load(data.save(dataset, tmp_path / name))
    assert again.fingerprint() == dataset.fingerprint() == data.concatenate([again]).fingerprint()
    assert_legal(data.concatenate(list(dataset.split(0.3))))
    bare = {"action_mask": None, "next_action_mask": None}
    plain = data.Dataset(**{name: getattr(dataset, name) for name in data.dataset.FIELDS}, **bare)
    with pytest.raises(ValueError, match=r"Maze has legal actions \(action_mask\) and the data set has none"):
        msrl.train("bc", Maze(), data=plain)
    with pytest.raises(ValueError, match="only one of the first data set and number 2"):
        data.concatenate([dataset, plain])
    wrong = data.Dataset(**{n: getattr(dataset, n) for n in dataset.columns} | {"action": np.full(len(dataset), 0)})
    with pytest.raises(ValueError, match="action of the data set is illegal by its action_mask in row"):
        msrl.train("bc", Maze(), data=wrong)


def test_actions_are_chosen_for_observations_with_their_legal_actions(run_of_ppo):
    result = run_of_ppo[0]
    obs, masks = np.float32([[0, 0], [3, 0], [2, 0]]), np.array([[0, 0, 1], [1, 0, 0], [0, 1, 0]], bool)
    np.testing.assert_array_equal(result.act(envs.MaskedObservation(obs, masks)), [2, 0, 1])
    assert result.act(envs.MaskedObservation(obs[0], masks[0]), jax.random.key(0)) == 2
    with pytest.raises(ValueError, match=r"Maze has an action mask; pass it .*MaskedObservation\(obs, action_mask\)"):
        result.act(obs)
    with pytest.raises(ValueError, match=r"observation \[1\] has no legal action"):
        result.act(envs.MaskedObservation(obs, masks & ~masks[1]))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Maze(stuck=1), "environment 1 returned an observation without a legal action"),
        (Maze(), "environment 1 was given an illegal action"),
    ],
)
def test_a_step_that_is_not_legal_is_named(env, message):
    venv = envs.vectorize(env, 2)
    state = venv.reset(jax.random.key(0))[0]
    state = state._replace(env_state=MazeState(jnp.array([2, 0]), jnp.zeros(2, jnp.int32), jnp.zeros(2, bool)))
    action = jnp.array([RIGHT, RIGHT if env.stuck else LEFT])
    closed = jax.make_jaxpr(msrl.fragment(role="env")(venv.step))(state, action)
    values = dict(zip(closed.jaxpr.invars, jax.tree.leaves((state, action)), strict=True))
    values |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    origin = find_origin(closed.jaxpr.eqns, values, closed.jaxpr.outvars)
    assert str(Failure.from_origin(origin, 1, False)).startswith(message)


def test_an_evaluation_whose_environment_gives_no_legal_action_says_so(run_of_ppo):
    result = run_of_ppo[0]
    played = make_evaluator(type(result.behavior)(result.behavior.agent, Maze(stuck=2)), 8)
    with pytest.raises(ValueError, match=r"Maze: \d of 8 .*An observation had no legal action"):
        played(result.state, jax.random.key(0))


def mlp(params, x):
    p = wide(params)["params"]
    for layer in (p["torso"]["Dense_0"], p["torso"]["Dense_1"]):
        x = np.maximum(x @ layer["kernel"] + layer["bias"], 0)
    head = p["head"] if "head" in p else p["Dense_0"]
    return x @ head["kernel"] + head["bias"]


@pytest.mark.parametrize("target", ["double", pytest.param("greedy", marks=pytest.mark.slow)])
@pytest.mark.long
def test_a_target_is_the_largest_value_of_the_legal_actions(target):
    env = Maze()
    agent, config = build("dqn", env, num_updates=1, tau=0.1, target_period=1, **{"replay.n_step": 2, "target": target})
    iterate = counting(agent)
    state = start(agent, 6, iterate)
    assert not maze_of(state).broken.any()
    preferred = lambda x: x + jnp.float32([1, 0, 0.5]) if x.shape == (3,) else x
    state = state._replace(**{n: jax.tree.map(preferred, getattr(state, n)) for n in ("params", "target_params")})
    after, _ = iterate(state, 6)
    batch, _ = drawn(env, config, state, after)
    online, slow = (mlp(params, np.float64(batch.next_obs.obs)) for params in (state.params, state.target_params))
    chooser = online if target == "double" else slow
    taken = mlp(state.params, np.float64(batch.obs.obs))[np.arange(B), batch.action]
    wanted, other = np.float64(batch.reward), 0
    for i, mask in enumerate(batch.next_obs.action_mask):
        if batch.discount[i]:
            best = max(np.flatnonzero(mask), key=lambda a, i=i: chooser[i, a])
            wanted[i] += batch.discount[i] * slow[i, best]
            other += best != chooser[i].argmax()
    assert other and (~batch.next_obs.action_mask.any(-1)).any(), "masks change choices, and an end has no legal action"
    np.testing.assert_allclose(after.pending.td_error[0], wanted - taken, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_discrete_sac_takes_expectations_over_the_legal_actions():
    env = Maze()
    agent, config = build("sac", env, num_updates=1, initial_temperature=0.3)
    iterate = counting(agent)
    state = start(agent, 20, iterate)
    assert not maze_of(state).broken.any()
    after, metrics = iterate(state, 20)
    batch, _ = drawn(env, config, state, after)
    temperature = np.exp(np.float64(state.params["log_temperature"]))

    def expectations(critic, obs):
        """Soft values and expected log-probabilities, action by action; 0 where no action is legal."""
        logits = mlp(state.params["actor"], np.float64(obs.obs))
        q = np.minimum(*(mlp(one(critic, i), np.float64(obs.obs)) for i in range(2)))
        value, entropy = np.zeros(B), np.zeros(B)
        for i, mask in enumerate(obs.action_mask):
            p = np.exp(logits[i, mask]) / np.exp(logits[i, mask]).sum()
            value[i], entropy[i] = p @ (q[i, mask] - temperature * np.log(p)), p @ np.log(p)
        return value, entropy

    assert (~batch.next_obs.action_mask.any(-1)).any() and (batch.obs.action_mask.sum(-1) == 2).any()
    target = batch.reward + batch.discount * expectations(state.target_params, batch.next_obs)[0]
    taken = [mlp(one(state.params["critic"], i), np.float64(batch.obs.obs))[np.arange(B), batch.action] for i in range(2)]
    np.testing.assert_allclose(after.pending.td_error[0], target - np.mean(taken, 0), rtol=1e-4, atol=1e-5)
    value, log_prob = expectations(state.params["critic"], batch.obs)
    np.testing.assert_allclose(metrics["actor_loss"].total, -value.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["entropy"].total, -log_prob.mean(), rtol=1e-4)
    wanted_entropy = np.log(batch.obs.action_mask.sum(-1)) / 2
    gradient = -(temperature * (log_prob + wanted_entropy)).mean()
    moved = adam(state.params["log_temperature"], state.opt_state["log_temperature"], gradient, config)
    np.testing.assert_allclose(after.params["log_temperature"], moved, rtol=1e-4)


def test_losses_with_illegal_actions_have_finite_gradients():
    obs = envs.MaskedObservation(jnp.zeros((3, 1)), jnp.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]], bool))
    q = jnp.float32([[1, 9, 3], [1, 2, 9], [5, 6, 7]])

    def value(logits):
        policy = AllActions(only_legal(logits, obs), legal=obs.action_mask)
        _, log_prob = policy.sample_and_log_prob(jax.random.split(jax.random.key(0), 3))
        return policy.expectation(soft_value(q, log_prob, jnp.float32(0.5)))

    found, slope = value(jnp.zeros((3, 3))), jax.grad(lambda logits: value(logits).sum())(jnp.zeros((3, 3)))
    np.testing.assert_allclose(found[:2], [2 + 0.5 * np.log(2), 2], rtol=1e-6)
    np.testing.assert_allclose(slope[:2], [[-0.5, 0, 0.5], [0, 0, 0]], atol=1e-6)
    assert np.isfinite(found).all() and np.isfinite(slope).all()
    wanted = AllActions(jnp.zeros((3, 3)), legal=obs.action_mask).usual_target_entropy()
    np.testing.assert_allclose(wanted, [0.5 * np.log(2), 0, 0], rtol=1e-6)  # half the largest entropy
    assert jax.vmap(greedy_target)(only_legal(q, obs), q).tolist() == [3, 2, 7]
