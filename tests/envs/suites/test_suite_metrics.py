"""The metrics of suites against what the suites report."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.envs.base import iter_wrapped
from msrl_jax.envs.masks import sample_legal
from msrl_jax.envs.suites.common import load, quiet

STEPS = 60


def play(env, theirs, steps=STEPS):
    """Reports `[T]` of random legal steps of one episode, which may go on after its end, and what `theirs` says."""
    several = (len(env.agents),) if envs.has_agents(env) else ()

    def step(state, key):
        keys = jax.random.split(key, several or (1,))
        mask = env.action_mask(state) if hasattr(env, "action_mask") else None
        mask = mask if several or mask is None else mask[None]
        action = jax.vmap(env.action_space.sample)(keys) if mask is None else jax.vmap(sample_legal)(keys, mask)
        action = action if several else jax.tree.map(lambda x: x[0], action)
        after = env.step(key, state, action)
        with quiet():
            expected = theirs(state, action, key, after)
        return after[0], (env.report(after[0]), expected)

    return jax.jit(lambda key: jax.lax.scan(step, env.reset(key)[0], jax.random.split(key, steps))[1])(jax.random.key(4))


def assert_equal(found, varies=()):
    ours, theirs = jax.device_get(found)
    assert set(ours) == set(theirs)
    for name in ours:
        np.testing.assert_allclose(np.float32(ours[name]), np.float32(theirs[name]), rtol=1e-3, atol=1e-4, err_msg=name)
    for name in varies:
        assert len(np.unique(ours[name])) > 1, name


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("Craftax-Classic-Symbolic-v1", 22), ("Craftax-Symbolic-v1", 67)])
def test_achievements_of_craftax(name, count):
    env = envs.make(f"craftax:{name}")
    assert len(env.metrics) == count and set(env.metrics.values()) == {"last"}

    def theirs(state, action, key, after):
        *_, info = env.env.env.step_env(key, state, action, env.env.params)
        done = env.env.env.is_terminal(after[0], env.env.params)
        reported = {name.partition("/")[2]: x / 100 for name, x in info.items() if name.startswith("Achievements/")}
        # The suite reports them at the end alone.
        return {name: jnp.where(done, reported[name], after[0].achievements[i]) for i, name in enumerate(reported)}

    assert_equal(play(env, theirs, 400), ["collect_wood"] if count == 22 else [])


@pytest.mark.slow
def test_the_history_of_craftax_classic_has_its_22_achievements(one_device):
    result = msrl.train(
        "ppo",
        "craftax:Craftax-Classic-Symbolic-v1:max_timesteps=30",
        num_envs=4,
        unroll_length=32,
        num_minibatches=1,
        num_epochs=1,
        hidden_sizes=(8,),
        total_steps=4 * 64,
        eval_episodes=2,
        progress=False,
        chunk=1,
        devices=one_device,
    )
    achievements = {each.name.lower() for each in load("craftax.craftax_classic.constants").Achievement}
    others = {"return", "length"}
    for start in ("episode", "eval"):
        names = {name.removeprefix(f"{start}_") for name in result.history if name.startswith(f"{start}_")}
        assert names - others == achievements and len(achievements) == 22
    shares = np.array([result.history[f"episode_{name}"] for name in achievements])
    assert ((shares >= 0) & (shares <= 1)).all() and shares.max() > 0


@pytest.mark.parametrize("name", ["Empty-5x5", "MultiRoom-N2-S4"])
def test_success_of_navix(name):
    pytest.importorskip("navix", reason="NAVIX needs Python 3.12")
    env, reached = envs.make(f"navix:Navix-{name}-v0"), load("navix.events").on_goal_reached
    assert env.metrics == {"success": "last"} and not envs.make("navix:Navix-Playground-v0").metrics

    def theirs(state, action, key, after):
        return {"success": reached(state.state, action, after[0].state)}

    assert_equal(play(env, theirs, 400), ["success"] if name.startswith("Empty") else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("Game2048-v1", {"highest_tile"}),
        ("SlidingTilePuzzle-v0", {"prop_correctly_placed"}),
        ("Maze-v0", set()),
        pytest.param("Connector-v3", {"num_connections", "ratio_connections", "total_path_length"}, marks=pytest.mark.slow),
    ],
)
def test_what_jumanji_reports(name, names):
    env = envs.make(f"jumanji:{name}")
    assert set(env.metrics) == names
    if not names:
        return

    def theirs(state, action, key, after):
        return env.env.step(state.env_state, action.astype(env.env.action_spec.dtype))[1].extras

    assert_equal(play(env, theirs), [] if envs.has_agents(env) else names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sums", "means"),
    [
        ("brax:reacher", {"reward_dist", "reward_ctrl"}, set()),
        pytest.param("brax:ant:backend=spring", {"reward_forward", "reward_ctrl"}, {"x_position"}, marks=pytest.mark.slow),
        pytest.param("playground:CartpoleBalance", {"reward_upright", "reward_centered"}, set(), marks=pytest.mark.slow),
    ],
)
def test_reward_terms_of_brax_and_playground(name, sums, means):
    env = envs.make(name)
    kinds = {kind: {x for x, reduction in env.metrics.items() if reduction == kind} for kind in ("sum", "mean")}
    assert sums <= kinds["sum"] and means <= kinds["mean"]
    inner = list(iter_wrapped(env))[-1]

    def theirs(state, action, key, after):
        return {name.replace("/", "_"): x for name, x in inner.step(state.env_state, action).metrics.items()}

    assert_equal(play(env, theirs, 20), sums)


@pytest.mark.long
@pytest.mark.parametrize("name", ["SMAX", pytest.param("HeuristicEnemySMAX", marks=pytest.mark.slow)])
def test_the_win_rate_of_smax_is_that_of_its_rewards(name):
    env = envs.make(f"jaxmarl:{name}", scenario="3m")
    assert env.metrics == {"success": "last"}
    allies = env.env.env.num_allies

    @jax.jit
    def outcomes(key):
        state, _ = env.reset(key)
        inner = state if hasattr(state, "unit_alive") else state.state
        ours = jnp.arange(len(inner.unit_alive)) < allies

        def outcome(allies_live, enemies_live):
            after = inner.replace(unit_alive=jnp.where(ours, allies_live, enemies_live))
            reward = env.env.env.compute_reward(after, inner.unit_health, inner.unit_health)[env.agents[0]]
            return env.report(after if inner is state else state.replace(state=after))["success"], reward

        return jax.vmap(outcome)(jnp.array([True, False, True, False]), jnp.array([False, False, True, True]))

    found, reward = outcomes(jax.random.key(0))
    np.testing.assert_array_equal(found, [1, 0, 0, 0])
    # The suite's log calls an episode won whose last reward is at least 1.
    np.testing.assert_array_equal(found, reward >= 1)


class Counting(gymnasium.Env):
    """Its info tells the step, unless it `lacks` that."""

    observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, lacks=lambda steps, length: False):
        self.lacks = lacks

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.length = 0, int(self.np_random.integers(2, 6))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        info = {"step": self.steps, "even": self.steps % 2 == 0, "text": "x", "pair": np.ones(2)}
        over = self.steps == self.length
        if self.lacks(self.steps, self.length):
            del info["step"]
        return np.full(1, self.steps, np.float32), 1.0, over, False, info


STEP_METRICS = {"step": "last", "even": "sum"}


@pytest.mark.long
def test_info_of_gymnasium(one_device):
    env = envs.GymnasiumEnvironment(Counting, metrics=STEP_METRICS, num_workers=1)
    result = msrl.train(
        "ppo",
        env,
        policy="MultiLearner",
        num_envs=4,
        unroll_length=16,
        num_minibatches=1,
        hidden_sizes=(8,),
        total_steps=4 * 64,
        eval_episodes=4,
        progress=False,
        chunk=1,
        devices=one_device,
    )
    history = result.history
    np.testing.assert_allclose(history["episode_step"], history["episode_length"], rtol=1e-6)
    assert (history["episode_even"] <= history["episode_step"] / 2).all() and (history["episode_even"] >= 1).all()
    np.testing.assert_array_equal(result.evaluation.metrics["step"], result.evaluation.lengths)
    np.testing.assert_array_equal(result.evaluation.metrics["even"], result.evaluation.lengths // 2)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"stepp": "last"}, "the info of a step has no metric 'stepp'; it has step, even, text, pair; every step"),
        ({"text": "last"}, "the metric 'text' in the info of a step is 'x'; only scalar numbers and bools are metrics"),
        ({"pair": "last"}, "the metric 'pair' in the info of a step is array"),
        ({"step": "first"}, r"metrics\['step'\] is 'first'.*; use one of last, sum, mean, max"),
        ("step", "cannot read metrics='step'"),
    ],
)
def test_keys_of_info_that_are_no_metrics_are_refused(metrics, message):
    with pytest.raises(ValueError, match=message):
        envs.GymnasiumEnvironment(Counting, "Counting", metrics=metrics)


@pytest.mark.long
def test_a_key_that_some_steps_lack_ends_the_run_with_a_sentence():
    message = "the info of a step has no metric 'step'; it has even, text, pair; every step must report it"
    with pytest.raises(ValueError, match=f"Counting: {message}"):  # found by an episode of random actions
        envs.GymnasiumEnvironment(lambda: Counting(lambda steps, length: steps == length), "Counting", metrics="step=max")
    env = envs.GymnasiumEnvironment(
        lambda: Counting(lambda steps, length: steps == length == 3), "Counting", metrics="step=max", num_workers=1
    )
    sim, seed = env.vectorize(1).simulators, np.zeros(1, np.uint32)
    steps, _ = sim.reset(seed)
    with pytest.raises(RuntimeError, match=f"^Counting: {message}$"):
        for _ in range(200):
            steps, _ = sim(seed, steps, np.zeros(1, np.int32))
