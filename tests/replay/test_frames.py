"""Stacked frames that are kept once, compared with the same observations kept whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import replay
from msrl_jax.algorithms import Replay
from msrl_jax.replay import frames

N, ENVS, UNROLL = 3, 4, 5
KEPT_ONCE = {"obs": "frame_stack(3)", "next_obs": "frame_stack(3)"}
SIZES = {"capacity": 160, "num_envs": ENVS, "unroll_length": UNROLL, "batch_size": 32}  # 40 steps of each


class Camera:
    """Environments that stack the last `N` frames, `[2, 2, N]`, all different. At a start, one fills the stack."""

    def __init__(self, seed, mean_length):
        self.rng, self.mean_length, self.stacks = np.random.default_rng(seed), mean_length, [None] * ENVS

    def frame(self):
        return self.rng.integers(0, 256, (2, 2, 1)).astype(np.uint8)

    def unroll(self):
        """Steps `[T, E, ...]` of a `Transition`."""
        rows = []
        for _ in range(UNROLL):
            row = []
            for e in range(ENVS):
                obs = np.repeat(self.frame(), N, -1) if self.stacks[e] is None else self.stacks[e]
                successor = np.concatenate([obs[..., 1:], self.frame()], -1)
                ends = self.rng.random() < 1 / self.mean_length
                cut = self.rng.random() < 0.5
                self.stacks[e] = None if ends else successor
                flags = np.bool_(ends and not cut), np.bool_(ends and cut)
                row.append(replay.Transition(obs, np.int32(len(rows)), np.float32(self.rng.normal()), *flags, successor))
            rows.append(jax.tree.map(lambda *x: np.stack(x), *row))
        return jax.tree.map(lambda *x: np.stack(x), *rows)


def example(unrolled):
    return jax.tree.map(lambda x: x[0, 0], unrolled)


def pair(make, item, **options):
    """The buffer that keeps frames once, and the one that keeps observations whole; with compiled functions."""
    buffers = make(item, **SIZES, **options, storage=KEPT_ONCE), make(item, **SIZES, **options)
    return [(b, jax.jit(b.insert), jax.jit(b.sample)) for b in buffers]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (replay.uniform, {}),
        (replay.uniform, {"length": 3, "discount": 0.9}),
        (replay.uniform, {"length": 4, "stride": 2}),
        (replay.prioritized, {"length": 2, "discount": 0.9}),
    ],
    ids=["steps", "n_step", "windows", "prioritized"],
)
def test_samples_are_those_of_observations_kept_whole(make, options):
    camera = Camera(0, mean_length=64)
    item = example(camera.unroll())
    camera = Camera(1, mean_length=64)
    once, whole = pair(make, item, **options)
    states = [b.init() for b, _, _ in (once, whole)]
    for i in range(40):  # five times around
        unrolled = camera.unroll()
        states = [insert(state, unrolled) for (_, insert, _), state in zip((once, whole), states, strict=True)]
        if i in (1, 7, 8, 9, 25, 39):
            got, wanted = (sample(s, jax.random.key(i)) for (_, _, sample), s in zip((once, whole), states, strict=True))
            jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert int(states[0].lost.sum()) == 0 and once[0].may_be_invalid and not whole[0].may_be_invalid


def test_steps_whose_frames_are_gone_have_weight_0_and_are_counted():
    """Episodes of 3 steps add 6 frames, and there is room for 40 + 3 + 4 * 5 frames of each environment."""
    camera = Camera(2, mean_length=3)
    item = example(camera.unroll())
    (buffer, insert, sample), (_, insert_whole, sample_whole) = pair(replay.uniform, item)
    state, whole, kept = buffer.init(), replay.uniform(item, **SIZES).init(), []
    pushed, newest, fresh, lost = np.zeros(ENVS, int), [], np.ones(ENVS, bool), 0
    for i in range(40):
        unrolled = camera.unroll()
        state, whole = insert(state, unrolled), insert_whole(whole, unrolled)
        lost += sum((pushed - (x - N + 1) > 63).sum() for x in (newest[-40:-35] if len(newest) >= 40 else []))
        for ends in unrolled.terminated | unrolled.truncated:
            pushed += np.where(fresh, N, 0)
            newest.append(pushed - 1)
            pushed, fresh = pushed + 1, ends
        got, wanted = sample(state, jax.random.key(i)), sample_whole(whole, jax.random.key(i))
        there = np.asarray(got.weight) == 1
        assert (there | (np.asarray(got.weight) == 0)).all()
        for x, y in zip(jax.tree.leaves(got.experience), jax.tree.leaves(wanted.experience), strict=True):
            np.testing.assert_array_equal(x[there], y[there])
        kept.append(there.mean())
    assert min(kept[:3]) == 1 and 0.6 < np.mean(kept[10:]) < 0.95
    assert int(state.lost.sum()) == lost and 100 < lost < 640, "a step is counted once, when it leaves"


def test_observations_that_are_no_stacks_are_lost_and_nothing_else():
    camera = Camera(3, mean_length=64)
    unrolled = camera.unroll()
    buffer = replay.uniform(example(unrolled), **SIZES, storage=KEPT_ONCE)
    unrolled.next_obs[2, 1] = 7  # and the observation of step 3 is another one
    state = buffer.insert(buffer.init(), unrolled)
    got = buffer.sample(state, jax.random.key(0))
    step, env = np.asarray(got.indices.step), np.asarray(got.indices.env)
    broken = (step == 2) & (env == 1)
    assert broken.any() and int(state.lost.sum()) == 1
    np.testing.assert_array_equal(got.weight, np.where(broken, 0, 1))
    np.testing.assert_array_equal(got.experience.obs[~broken], unrolled.obs[step, env][~broken])
    np.testing.assert_array_equal(got.experience.next_obs[~broken], unrolled.next_obs[step, env][~broken])


def test_counts_of_frames_start_over(monkeypatch):
    """A count that wraps is of the same slot of the ring, and one whole stack is added there."""
    camera = Camera(4, mean_length=64)
    item = example(camera.unroll())
    monkeypatch.setattr(frames, "LARGEST", 200)
    buffer = replay.uniform(item, **SIZES, storage=KEPT_ONCE)
    whole = replay.uniform(item, **SIZES)
    states = buffer.init(), whole.init()
    inserts, samples = [jax.jit(b.insert) for b in (buffer, whole)], [jax.jit(b.sample) for b in (buffer, whole)]
    for i in range(60):
        unrolled = camera.unroll()
        states = [insert(s, unrolled) for insert, s in zip(inserts, states, strict=True)]
        got, wanted = (sample(s, jax.random.key(i)) for sample, s in zip(samples, states, strict=True))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_a_million_steps_of_atari_fit_8_gb():
    stack, flag = jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8), jax.ShapeDtypeStruct((), jnp.bool_)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    item = replay.Transition(stack, jax.ShapeDtypeStruct((), jnp.int32), number, flag, flag, stack)
    storage = {"obs": "frame_stack(4)", "next_obs": "frame_stack(4)"}
    buffer = replay.uniform(item, capacity=1_000_000, num_envs=32, unroll_length=4, batch_size=32, storage=storage)
    assert buffer.capacity == 999_936 and 7.0e9 < buffer.nbytes < 7.6e9


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ({"obs": "frame_stack(3)"}, r"needs both obs and next_obs of a msrl_jax\.replay\.Transition"),
        ({"reward": "frame_stack(3)"}, r"cannot pack item\.reward"),
        ({"obs": "frame_stack(2)", "next_obs": "frame_stack(2)"}, r"cannot pack item\.obs, which is uint8\[2, 2, 3\]"),
    ],
)
def test_what_cannot_be_kept_once_is_refused(storage, message):
    with pytest.raises(ValueError, match=message):
        replay.uniform(example(Camera(0, 9).unroll()), **SIZES, storage=storage)


RUN = {
    "num_envs": 8,
    "unroll_length": 4,
    "batch_size": 32,
    "hidden_sizes": (8,),
    "progress": False,
    "policy": "GPUOnly:num_devices=1",
}


def test_a_run_is_the_same_and_the_text_of_the_option_is_read():
    env = msrl.envs.FrameStack(msrl.envs.make("CartPole-v1"), 4)
    replays = [f"replay:capacity=4096,learning_starts=128{storage}" for storage in ("", ",storage=frame_stack(4)")]
    runs = [msrl.train("dqn", env, total_steps=1024, eval_episodes=0, replay=r, **RUN) for r in replays]
    assert runs[1].config.replay == Replay(4096, learning_starts=128, storage="frame_stack(4)")
    assert str(runs[1].config.replay) == replays[1].replace("=frame_stack(4)", "='frame_stack(4)'")
    for x, y in zip(*(jax.tree.leaves(run.state.params) for run in runs), strict=True):
        np.testing.assert_array_equal(x, y)
    known = r"; use one of bfloat16, scaled_uint8, uint8, frame_stack\(n\)$"
    for codec, fact in (("frames", r"unknown codec 'frames' \(did you .*\)"), ("delta", "delta is only for sending")):
        with pytest.raises(ValueError, match=rf"Replay\.storage: {fact}{known}"):
            Replay(storage=codec)


@pytest.mark.parametrize("codec", ["frame_stack(4)", "uint8"])
def test_a_run_whose_observations_do_not_fit_the_codec_ends(codec):
    replay = f"replay:capacity=2048,learning_starts=128,storage={codec}"
    with pytest.raises(ValueError, match=r"has lost 100% of the steps: replay\.storage cannot keep their observations"):
        msrl.train("dqn", total_steps=512, eval_episodes=0, replay=replay, **RUN)


def test_a_run_that_loses_steps_of_short_episodes_warns_once():
    env = msrl.envs.FrameStack(msrl.envs.TimeLimit(msrl.envs.make("CartPole-v1"), 5), 4)
    replay = "replay:capacity=2048,learning_starts=128,storage=frame_stack(4)"
    with pytest.warns(UserWarning, match=r"has lost \d+% of the steps") as warned:
        msrl.train("dqn", env, total_steps=4096, eval_episodes=0, replay=replay, chunk=8, **RUN)
    assert len(warned) == 1
