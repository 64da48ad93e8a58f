"""Worker processes: the steps are Gymnasium's own, and environments that misbehave cost only their own steps."""

import functools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.agents.action_spaces import check_bounded
from msrl_jax.envs import GymnasiumEnvironment, episode_sums, workers
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.vector_wrappers import EpisodeStatisticsState
from tests.support import processes
from tests.support.full_disk import no_file_above
from tests.support.simulators import Counting, Parts
from tests.support.slow import slow_unless

ROOT = Path(__file__).parents[2]


def simulators(env, num_envs=4):
    """The simulators of a vector environment, and their seeds."""
    return env.vectorize(num_envs).simulators, np.arange(num_envs, dtype=np.uint32) + 10


def play(sim, seed, actions):
    """The outcomes of some steps, `[T, N, ...]`, and the first observations."""
    steps, first = sim.reset(seed)
    outcomes = []
    for action in actions:
        steps, outcome = sim(seed, steps, action)
        outcomes.append(outcome)
    return first, jax.tree.map(lambda *x: np.stack(x), *outcomes)


def expected(factory, seed, actions):
    """What one environment does, stepped here; every episode has a seed of its own."""
    env, episode, rows = factory(), 0, []

    def begin():
        nonlocal episode
        made = np.random.SeedSequence([int(seed), episode]).generate_state(1)[0]
        episode += 1
        return env.reset(seed=int(made))[0]

    first = obs = begin()
    for action in actions:
        final, reward, terminated, truncated, _ = env.step(action)
        obs = begin() if terminated or truncated else final
        rows.append((obs, np.float32(reward), terminated, truncated, final, True))
    return first, jax.tree.map(lambda *x: np.stack(x), *rows)


EACH_TIME = {(3, "CartPole-v1"), (1, "HalfCheetah-v5")}
RUNS = [(n, name) for n in (1, 3) for name in ("Pendulum-v1", "CartPole-v1", "HalfCheetah-v5")]


@pytest.mark.parametrize(("num_workers", "name"), [slow_unless(run in EACH_TIME, *run) for run in RUNS])
def test_steps_are_those_of_gymnasium_in_this_process(num_workers, name):
    limit = {"max_episode_steps": 7}
    env = msrl.envs.make(f"gymnasium:{name}", num_workers=num_workers, **limit)
    space = gymnasium.make(name).action_space
    space.seed(0)
    actions = np.stack([[space.sample() for _ in range(4)] for _ in range(30)])
    sim, seed = simulators(env)
    first, played = play(sim, seed, actions)
    for e in range(4):
        one = lambda: gymnasium.make(name, **limit)
        begun, wanted = expected(one, seed[e], actions[:, e])
        np.testing.assert_array_equal(first[e], begun.astype(np.float32))
        for x, y in zip(played, wanted, strict=True):
            np.testing.assert_array_equal(x[:, e], y.astype(x.dtype))
    assert played[3].any()


@pytest.mark.parametrize(
    ("num_envs", "step_seconds", "number"),
    [(16, 0.0, 1), (16, 1e-5, 1), (16, 1e-4, 2), (64, 1e-4, 5), (64, 1e-2, 8), (2, 1.0, 2), (4, math.inf, 4)],
)
def test_slower_environments_have_more_workers(monkeypatch, num_envs, step_seconds, number):
    monkeypatch.setattr(workers, "processors", lambda: 8)
    assert workers.best_number(num_envs, step_seconds) == number


def test_the_number_of_workers_follows_the_measured_time(monkeypatch):
    monkeypatch.setattr(workers, "processors", lambda: 4)

    class Slow(Counting):
        def step(self, action):
            time.sleep(0.01)
            return super().step(action)

    def started(env):
        sim, _ = simulators(env)
        try:
            return len(sim.simulators._processes)
        finally:
            sim.close()

    assert started(GymnasiumEnvironment(Counting)) == 1 and started(GymnasiumEnvironment(Slow)) == 4
    assert started(GymnasiumEnvironment(functools.partial(Counting, raises_at=1))) == 4  # it is its worker that reports this
    assert started(GymnasiumEnvironment(Counting, num_workers=2)) == 2


def test_observations_of_several_parts_and_actions_of_several_integers():
    env = GymnasiumEnvironment(Parts, num_workers=2)
    assert str(env.action_space) == "Box(0, [1 2], (2,), int32)"
    actions = np.random.default_rng(0).integers(0, [2, 3], (20, 4, 2)).astype(np.int32)
    sim, seed = simulators(env)
    first, played = play(sim, seed, actions)
    kinds = msrl.envs.spaces.struct(env.observation_space)
    for x, kind in zip(jax.tree.leaves(first), jax.tree.leaves(kinds), strict=True):
        assert (x.shape, x.dtype) == ((4, *kind.shape), kind.dtype)
    for e in range(4):
        begun, wanted = expected(Parts, seed[e], actions[:, e])
        ours = *(x[e] for x in jax.tree.leaves(first)), *(x[:, e] for x in jax.tree.leaves(played))
        for x, y in zip(ours, jax.tree.leaves((begun, wanted)), strict=True):
            np.testing.assert_array_equal(x, y)
    assert played[2].any()


class Elsewhere(gymnasium.Env):
    """Spaces whose integers start elsewhere; pays 1 if the action is what was shown."""

    observation_space = gymnasium.spaces.Dict(
        {
            "choice": gymnasium.spaces.Discrete(3, start=10),
            "several": gymnasium.spaces.MultiDiscrete([2, 3], start=[-1, 5]),
            "parts": gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(2, start=-1),)),
        }
    )
    action_space = gymnasium.spaces.Discrete(3, start=10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.show(), {}

    def show(self):
        self.shown = int(self.np_random.integers(3)) + 10
        return {"choice": self.shown, "several": np.array([self.shown % 2 - 1, 7]), "parts": (self.shown % 2 - 1,)}

    def step(self, action):
        assert self.action_space.contains(action)
        reward = float(action == self.shown)
        return self.show(), reward, False, False, {}


@pytest.mark.long
def test_integers_that_start_elsewhere_stay_what_they_are_and_are_one_hot_to_networks():
    env = GymnasiumEnvironment(Elsewhere, num_workers=1)
    choice = msrl.envs.Discrete(3, start=10)
    several, parts = msrl.envs.Box([-1, 5], [0, 7], (2,), np.int32), msrl.envs.Tuple((msrl.envs.Discrete(2, start=-1),))
    assert env.action_space == choice
    assert env.observation_space == msrl.envs.Dict({"choice": choice, "several": several, "parts": parts})
    sim, seed = simulators(env)
    steps, first = sim.reset(seed)
    assert set(first["choice"]) <= {10, 11, 12} and (first["several"] >= several.low).all()
    one_hot = np.asarray(msrl.envs.spaces.flatten(choice, first["choice"]))
    np.testing.assert_array_equal(one_hot, np.eye(3)[first["choice"] - 10])
    right = np.asarray(action_transform(choice)(one_hot.argmax(-1)))
    _, (_, reward, *_) = sim(seed, steps, right)
    assert (reward == 1).all()


def test_the_largest_floats_of_gymnasium_are_no_bounds():
    class Free(Counting):
        action_space = gymnasium.spaces.Box(np.float32([-3.4028235e38, -1]), np.float32([3.4028235e38, 1]))

    space = GymnasiumEnvironment(Free, num_workers=1).action_space
    assert space == msrl.envs.Box([-np.inf, -1], [np.inf, 1], (2,))
    given = np.float32([[0.5, 2.0]])
    np.testing.assert_array_equal(action_transform(space)(given), [[0.5, 1.0]])
    with pytest.raises(ValueError, match=r"sac needs finite bounds .*the largest float counts as no bound"):
        check_bounded("sac", space)


def test_a_state_of_another_step_begins_a_new_episode_that_does_not_count():
    sim, seed = simulators(GymnasiumEnvironment(Counting, num_workers=2))
    steps, _ = sim.reset(seed)
    for _ in range(3):
        steps, _ = sim(seed, steps, np.ones(4, np.float32))
    steps[2] = 1
    steps, (obs, reward, terminated, truncated, _, valid) = sim(seed, steps, np.ones(4, np.float32))
    assert valid.tolist() == [True, True, False, True]
    assert (truncated & ~valid).tolist() == [False, False, True, False] and not terminated.any()
    assert steps.tolist() == [4, 4, 2, 4] and obs[:, 1].tolist() == [4, 4, 1, 4]
    assert reward.tolist() == [1, 1, 0, 1]


def test_every_episode_that_begins_after_a_lost_step_is_another_one():
    sim, seed = simulators(GymnasiumEnvironment(functools.partial(Counting, 1000), num_workers=1), 1)
    steps, first = sim.reset(seed)
    begun = [first[0, 0]]
    for lost in (3, 8):
        steps, (obs, *_, valid) = sim(seed, steps + np.uint32(lost), np.ones(1, np.float32))
        assert not valid.any()
        begun.append(obs[0, 0])
    assert len(set(begun)) == 3


def test_failures_count_in_a_row_alone(monkeypatch):
    """The environment fails in its third step each time that it is made again, more often than is tolerated in a row."""
    monkeypatch.setattr(workers, "_PAUSE", 0.001)
    monkeypatch.setattr(workers, "_TRIES", 3)
    sim, seed = simulators(GymnasiumEnvironment(functools.partial(Counting, 1000, raises_at=3), num_workers=1), 1)
    steps, _ = sim.reset(seed)
    answers = []
    for _ in range(24):
        steps, (*_, valid) = sim(seed, steps, np.ones(1, np.float32))
        answers.append(bool(valid[0]))
    assert answers.count(False) > 3 < answers.count(True)


@pytest.mark.parametrize("fault", ["raises_at", *(pytest.param(x, marks=pytest.mark.long) for x in ("hangs_at", "dies_at"))])
def test_an_environment_that_fails_loses_its_episode_alone_and_starts_again(fault, tmp_path, caplog):
    factory = functools.partial(Counting, 1000, **{fault: 3}, once=str(tmp_path / "failed"))
    sim, seed = simulators(GymnasiumEnvironment(factory, num_workers=4, timeout=1.0))
    steps, _ = sim.reset(seed)
    lost, valid = np.zeros((4, 0), bool), np.ones(4, bool)
    start = time.monotonic()
    while time.monotonic() - start < 30 and not (lost.any() and valid.all()):
        steps, (obs, reward, _, truncated, _, valid) = sim(seed, steps, np.ones(4, np.float32))
        lost = np.c_[lost, ~valid]
        assert (truncated == ~valid).all() and (reward == valid).all()
        assert np.isfinite(obs).all()
        if lost.any():
            time.sleep(0.02)
    (failed,) = np.flatnonzero(lost.any(1))
    assert lost[failed].sum() > 1 and not lost[:, :2].any()
    others = np.delete(obs[:, 1], failed)
    assert (others == len(lost[0])).all() and obs[failed, 1] < len(lost[0])
    assert "failed and will be restarted" in caplog.text


@pytest.mark.long
def test_an_environment_that_always_fails_ends_the_run_with_its_error(monkeypatch):
    monkeypatch.setattr(workers, "_PAUSE", 0.001)
    env = GymnasiumEnvironment(functools.partial(Counting, raises_at=1), num_workers=1)
    sim, seed = simulators(env, 1)
    steps, _ = sim.reset(seed)
    with pytest.raises(RuntimeError, match=r"environment 0 of .* failed 3 times in a row(.|\n)*ArithmeticError: the physics d"):
        for _ in range(1000):
            steps, _ = sim(seed, steps, np.ones(1, np.float32))


class Broken(Counting):
    made = 0

    def reset(self, **options):
        raise FileNotFoundError("no such scene")


@pytest.mark.long
def test_an_environment_that_never_starts_is_reported_at_once():
    sim, seed = simulators(GymnasiumEnvironment(Broken, num_workers=1), 2)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"failed 3 times in a row(.|\n)*FileNotFoundError: no such scene"):
        sim.reset(seed)
    assert time.monotonic() - start < 20


@pytest.mark.long
def test_a_step_does_not_wait_for_the_slowest():
    factory = functools.partial(Counting, 20, slow=0.05)  # episodes with a start below 0.5 are slow
    sim, seed = simulators(GymnasiumEnvironment(factory, num_workers=8, drop_slowest=0.25), 8)
    steps, _ = sim.reset(seed)
    returned, dropped = [], 0
    total = np.zeros(8)
    for _ in range(120):
        steps, (_, reward, terminated, truncated, _, valid) = sim(seed, steps, np.ones(8, np.float32))
        total += reward
        dropped += (~valid).sum()
        assert not (truncated & ~valid).any()  # nothing is lost
        for e in np.flatnonzero(terminated | truncated):
            returned.append(total[e])
            total[e] = 0
    assert dropped > 0 and set(returned) == {20.0}, "every reward is in a return"


# SIGTERM ends a process as SIGKILL does: it has no handler.
@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, *(slow_unless(False, x) for x in ("leave", signal.SIGINT, signal.SIGTERM))])
def test_workers_stop_with_their_parent_however_it_ends(how, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
from tests.envs.test_host_simulators import simulators, GymnasiumEnvironment, Counting
import functools
sim, seed = simulators(GymnasiumEnvironment(functools.partial(Counting, hangs_at=2), num_workers=2))
steps, _ = sim.reset(seed)
print(*(worker.process.pid for worker in sim.simulators._processes), flush=True)
steps, _ = sim(seed, steps, np.ones(4, np.float32))
if sys.argv[1] == "leave":
    sys.exit()
sim(seed, steps, np.ones(4, np.float32))  # hangs
"""
    )
    parent = processes.start(
        [sys.executable, str(script), str(how)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if how != "leave":
        time.sleep(0.3)
        parent.send_signal(how)
    parent.wait(30)
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z" if Path(f"/proc/{pid}").exists() else False


def test_a_pool_that_nobody_holds_ends_its_workers():
    sim, seed = simulators(GymnasiumEnvironment(Counting, num_workers=2))
    assert not sim._simulators  # nothing starts before the first reset
    sim.reset(seed)
    pids = [worker.process.pid for worker in sim.simulators._processes]
    del sim
    assert not any(map(alive, pids))


def test_a_small_dev_shm_is_an_error_and_not_the_end_of_the_process(tmp_path):
    """Memory that is only reserved ends the process by SIGBUS when it is used."""
    memory, file = workers._shared_memory(2**20)
    assert len(memory) == 2**20 <= 512 * os.fstat(file).st_blocks
    os.close(file)
    with no_file_above(2**16), pytest.raises(OSError, match=r"for 1,048,576 bytes of the simulators; use fewer environments"):
        workers._shared_memory(2**20)


def test_constructors_of_the_main_module_and_closures_work():
    offset = 3

    class Local(Counting):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, reward + offset, *rest

    sim, seed = simulators(GymnasiumEnvironment(Local, num_workers=1), 2)
    _, played = play(sim, seed, np.ones((2, 2), np.float32))
    assert (played[1] == 4).all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_workers": 0}, "num_workers=0: use an integer of at least 1"),
        ({"timeout": 0}, "timeout=0 must be a number of seconds above 0"),
        ({"timeout": "1s"}, "timeout='1s' must be a number of seconds above 0"),
        ({"drop_slowest": 1}, r"drop_slowest=1 must be a share of the environments, in \[0, 1\)"),
    ],
    ids=["workers", "timeout", "text", "drop"],
)
def test_bad_numbers_are_refused_before_anything_starts(kwargs, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumEnvironment(Counting, **kwargs)


def test_a_vector_environment_is_refused_before_anything_starts():
    with pytest.raises(TypeError, match=r"return a single gymnasium\.Env"):
        GymnasiumEnvironment(lambda: gymnasium.make_vec("CartPole-v1", 2))  # type: ignore[arg-type]


class Shaped(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 2 * reward


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (Counting, "Counting"),
        (lambda: gymnasium.wrappers.TimeLimit(Counting(), 5), "Counting"),
        (lambda: Shaped(Counting()), "Shaped"),
        (lambda: gymnasium.make("CartPole-v1"), "CartPoleEnv (CartPole-v1)"),
    ],
    ids=["class", "time limit", "wrapper", "id"],
)
def test_an_environment_without_a_name_has_that_of_its_class(factory, name):
    env = GymnasiumEnvironment(factory)
    assert env.name == name and repr(env) == f"GymnasiumEnvironment({name!r})"
    assert GymnasiumEnvironment(factory, "mine").name == "mine"


def test_integers_that_do_not_fit_are_errors_of_the_environment():
    class Large(Counting):
        observation_space = gymnasium.spaces.Box(0, 2**50, (2,), np.int64)

        def reset(self, **options):
            super().reset(**options)
            return np.array([1, 2**40]), {}

    sim, seed = simulators(GymnasiumEnvironment(Large, num_workers=1), 1)
    with pytest.raises(RuntimeError, match=r"the observation \[.*1099511627776\] does not fit int32"):
        sim.reset(seed)


def test_environments_registered_in_this_process_are_known_to_workers():
    gymnasium.register("RegisteredHere-v0", Counting)
    sim, seed = simulators(msrl.envs.make("gymnasium:RegisteredHere-v0", num_workers=1, length=3), 2)
    _, played = play(sim, seed, np.ones((3, 2), np.float32))
    assert played[3].tolist() == [[False] * 2, [False] * 2, [True] * 2]


def test_an_observation_of_another_shape_is_an_error_of_the_environment():
    class Wrong(Counting):
        def reset(self, **options):
            return np.zeros(3), {}

    sim, seed = simulators(GymnasiumEnvironment(Wrong, num_workers=1), 1)
    with pytest.raises(RuntimeError, match=r"the observation has shape \(3,\), but the observation space says \(2,\)"):
        sim.reset(seed)


def test_episode_statistics_leave_out_lost_episodes():
    class Scripted:
        num_envs, name, axes = 2, "scripted", None
        observation_space = action_space = msrl.envs.Box(-1, 1, ())

        def step(self, state, action):
            t = state
            rows = [  # reward, terminated, truncated, present, of two environments
                ([1, 1], [0, 0], [0, 0], [1, 1]),
                ([0, 1], [0, 0], [1, 0], [0, 1]),  # the first loses its episode
                ([1, 0], [0, 0], [0, 0], [1, 0]),  # the second is late
                ([1, 5], [1, 1], [0, 0], [1, 0]),  # the second catches up at its end
            ]
            reward, terminated, truncated, valid = (jnp.array(row) for row in zip(*rows, strict=True))
            flags = (x[t].astype(bool) for x in (terminated, truncated))
            zero = jnp.zeros(2)
            return t + 1, msrl.envs.TimeStep(zero, reward[t].astype(jnp.float32), *flags, zero, valid[t].astype(bool))

        def pop_episodes(self, state):
            return state, {}

    env = msrl.envs.EpisodeStatistics(Scripted())
    state = EpisodeStatisticsState(0, episode_sums.begin(env, 2))
    for _ in range(4):
        state, _ = env.step(state, None)
    _, metrics = env.pop_episodes(state)
    assert [float(metrics[k].total) for k in ("episode_return", "episode_length")] == [2 + 7, 2 + 2]
    assert float(metrics["episode_return"].count) == 2
