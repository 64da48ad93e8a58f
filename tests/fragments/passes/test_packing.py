"""Packed edges: fewer bytes, the promised values, and an error if a codec cannot keep its promise."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments import codecs
from msrl_jax.fragments.passes.instructions import Move, walk
from msrl_jax.policies import Central, Edge, Layout, SingleLearnerCoarse, SingleLearnerFine
from tests.support import toy
from tests.support.compare import assert_close, run_plain
from tests.support.slow import slow_unless


def round_trip(c, x):
    return np.asarray(jax.jit(lambda x: c.decode(c.encode(x), jax.typeof(x)))(x))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False), min_size=2, max_size=20))
def test_bfloat16_keeps_eight_bits(values):
    x = np.float32(values)
    normal = np.abs(x) > 1e-37
    np.testing.assert_allclose(round_trip(codecs.BFLOAT16, x)[normal], x[normal], rtol=2**-8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False), min_size=2, max_size=20))
def test_scaled_uint8_keeps_a_five_hundredth_of_the_range(values):
    x = np.float32(values)
    span = float(x.max()) - float(x.min())
    slack = 1e-6 * np.abs(x).max() + 1e-30
    np.testing.assert_allclose(round_trip(codecs.SCALED_UINT8, x), x, rtol=0, atol=span / 510 + slack)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_uint8_is_exact_on_bytes_and_says_when_it_is_not(dtype):
    x = np.arange(256, dtype=dtype)
    assert (round_trip(codecs.UINT8, x) == x).all() and round_trip(codecs.UINT8, x).dtype == dtype
    assert bool(codecs.UINT8.holds(x)) and not bool(codecs.UINT8.holds(x + 1)) and not bool(codecs.UINT8.holds(x - 1))
    assert not bool(codecs.UINT8.holds(np.float32([0.5, 1.0])))


def stacked_frames(resets, frames=3, envs=2, channels=2, seed=0):
    """The observations of an environment with a frame stack, in NumPy."""
    rng = np.random.default_rng(seed)
    rows, stacks = [], [np.concatenate([rng.normal(size=(envs, 1, 1, channels))] * frames, -1) for _ in range(1)]
    stack = stacks[0]
    for reset in resets:
        frame = rng.normal(size=(envs, 1, 1, channels))
        pushed = np.concatenate([stack[..., channels:], frame], -1)
        begun = np.concatenate([frame] * frames, -1)
        stack = np.where(np.asarray(reset).reshape(envs, 1, 1, 1), begun, pushed)
        rows.append(stack)
    return np.float32(np.stack(rows))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=6), st.integers(0, 99))
def test_frame_stacks_are_unpacked_exactly_wherever_episodes_start(resets, seed):
    x = stacked_frames(resets, seed=seed)
    c = codecs.frame_stack(3)
    assert bool(c.holds(jnp.asarray(x)))
    np.testing.assert_array_equal(round_trip(c, x), x)
    sent = sum(4 * y.size for y in jax.tree.leaves(jax.eval_shape(c.encode, x)) if y.dtype == jnp.float32)
    assert sent == x[0].nbytes + x[1:].nbytes // 3
    assert not bool(c.holds(jnp.asarray(x).at[1, 0, 0, 0, 0].add(1)))


LOSSY = [
    (SingleLearnerCoarse(trajectory_codec="bfloat16", parameter_codec="bfloat16"), SingleLearnerCoarse(), 2.5e-2),
    (SingleLearnerCoarse(parameter_codec="bfloat16", staleness=1), SingleLearnerCoarse(staleness=1), 2.5e-2),
    (SingleLearnerFine(observation_codec="scaled_uint8"), SingleLearnerFine(), 2.5e-2),
    (Central(gradient_codec="bfloat16", parameter_codec="bfloat16"), Central(), 2.5e-2),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "plain", "tolerance"), [slow_unless(p is LOSSY[0], *p) for p in LOSSY], ids=lambda p: type(p).__name__
)
def test_a_lossy_codec_sends_less_and_changes_little(policy, plain, tolerance, moved_bytes):
    state = toy.initial_state()
    packed, whole = (msrl.compile(toy.iteration, state, policy=p, axes=toy.AXES) for p in (policy, plain))
    plan, without = packed.explain(), whole.explain()
    assert moved_bytes(packed, state) == plan.bytes_crossing < plan.unpacked_bytes_crossing == without.bytes_crossing
    values = lambda p: {(c.value, c.dtype, c.shape, c.source, c.times, c.unpacked_bytes) for c in p.crossings}
    assert values(plan) == values(without)
    (_, a), (_, b) = packed.run(state, 3), whole.run(state, 3)
    assert not np.array_equal(a["loss"], b["loss"])
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=tolerance, atol=tolerance)


class Packed:
    """A policy with codecs added to its edges."""

    def __init__(self, policy, *codecs):
        self.policy, self.codecs = policy, codecs

    def layout(self, devices, sizes):
        layout = self.policy.layout(devices, sizes)
        return Layout(layout.roles, layout.staleness, self.codecs, layout.policy)


def frames(state):
    """An environment that returns its last three numbers and restarts every fifth step; a learner that sums with weights."""

    @msrl.fragment(role="env")
    def env_step(x, t):
        new = jnp.sin(x[:, -1:] + 1)
        return jnp.where(t % 5 == 0, jnp.concatenate([new] * 3, -1), jnp.concatenate([x[:, 1:], new], -1))

    @msrl.fragment(role="learner")
    def learn(w, rows):
        return w + (rows * jnp.arange(24.0).reshape(8, 1, 3)).mean()

    x, rows = jax.lax.scan(lambda x, t: (env_step(x, t), x), state["x"], jnp.arange(8))
    return {"w": learn(state["w"], rows), "x": x}, {"w": state["w"]}


def test_a_stack_of_frames_is_sent_once(moved_bytes):
    state = {"w": jnp.float32(0), "x": jnp.tile(jnp.arange(16.0)[:, None], 3)}
    policies = SingleLearnerCoarse(), SingleLearnerCoarse(trajectory_codec="frame_stack(3, 1)")
    plain, packed = (msrl.compile(frames, state, policy=p, axes={"w": P(), "x": P("env")}) for p in policies)
    a, b = plain.run(state, 3), packed.run(state, 3)
    assert_close(a, b, rtol=0, atol=0)
    assert_close(a, run_plain(frames, state, 3))
    (crossing,) = packed.explain().crossings
    assert (crossing.value, crossing.shape, crossing.codec) == ("state['x']", (8, 16, 3), "frame_stack(3, 1)")
    first, frame, marks = 16 * 3 * 4, 16 * 4, 16
    assert crossing.nbytes == first + 7 * (frame + marks) == moved_bytes(packed, state)
    assert crossing.unpacked_bytes == 8 * 3 * frame == plain.explain().bytes_crossing


def pixels(state):
    """An environment of whole numbers, and a learner that averages them."""

    @msrl.fragment(role="env")
    def env_step(x):
        return (3 * x + 1) % 256

    @msrl.fragment(role="actor")
    def act(w, x):
        return x + 0 * w.astype(x.dtype)

    @msrl.fragment(role="learner")
    def learn(w, rows):
        return w + rows.astype(jnp.float32).mean()

    def step(x, _):
        x = env_step(act(state["w"], x))
        return x, x

    x, rows = jax.lax.scan(step, state["x"], None, length=4)
    return {"w": learn(state["w"], rows) * 0.5, "x": x}, {"w": state["w"]}


@pytest.mark.parametrize("policy", [SingleLearnerCoarse(), SingleLearnerFine()], ids=lambda p: type(p).__name__)
def test_a_lossless_codec_changes_nothing_but_the_bytes(policy):
    state = {"w": jnp.float32(0), "x": jnp.arange(16, dtype=jnp.int32)}
    lower = "actors" if isinstance(policy, SingleLearnerCoarse) else "envs"
    programs = [
        msrl.compile(pixels, state, policy=p, axes={"w": P(), "x": P("env")})
        for p in (policy, Packed(policy, Edge(lower, "learners", "uint8"), Edge("learners", lower, "uint8")))
    ]
    reference = run_plain(pixels, state, 3)
    for program in programs:
        assert_close(program.run(state, 3), reference)
    plain, packed = (p.explain().bytes_crossing for p in programs)
    assert packed < 0.45 * plain
    np.testing.assert_array_equal(programs[0].run(state, 3)[0]["w"], programs[1].run(state, 3)[0]["w"])


LOST = [
    (SingleLearnerFine, "uint8", 1.0, r"\[-\d.*, \d.*\], and the codec promises the same values, if they are whole numbers"),
    (SingleLearnerCoarse, "frame_stack(2, 1)", 1.0, r"\[-\d.*, \d.*\], and .* if each row is the previous one"),
    (SingleLearnerCoarse, "scaled_uint8", np.inf, r"\[.*(inf|nan)\], and .* for finite values"),
]


def test_one_nan_among_several_shards_is_no_range():
    state = toy.initial_state()
    state = state._replace(x=state.x.at[1].set(jnp.nan))
    packed = Packed(SingleLearnerCoarse(actors=4), Edge("actors", "learners", "scaled_uint8", only="x"))
    program = msrl.compile(toy.iteration, state, policy=packed, axes=toy.AXES)
    with pytest.raises(ValueError, match=r"'scaled_uint8' cannot hold state\.x .* for finite values"):
        program.run(state, 1)


@pytest.mark.parametrize(("policy", "name", "scale", "message"), LOST)
def test_values_that_a_codec_cannot_hold_stop_the_run(policy, name, scale, message):
    lower = "actors" if policy is SingleLearnerCoarse else "envs"
    state = toy.initial_state()
    state = state._replace(x=state.x * scale)
    packed = Packed(policy(), Edge(lower, "learners", name, only="x"))
    program = msrl.compile(toy.iteration, state, policy=packed, axes=toy.AXES)
    start = rf"codec '{re.escape(name)}' cannot hold state\.x on its way from '{lower}' to 'learners': its values are in "
    with pytest.raises(ValueError, match=start + message):
        program.run(state, 2)


@pytest.mark.parametrize("largest", [1e38, 3e38])
def test_scaled_uint8_holds_finite_values_only_if_their_range_is_finite(largest):
    state = {"w": jnp.float32(0), "x": jnp.linspace(-largest, largest, 8, dtype=jnp.float32)}
    send = msrl.fragment(role="env")(lambda x: -x)
    receive = msrl.fragment(role="learner")(lambda w, x: w + x[0] * 1e-38 + x[-1])
    policy = Packed(SingleLearnerFine(envs=1), Edge("envs", "learners", "scaled_uint8"))

    def iteration(state):
        x = send(state["x"])
        return {"w": receive(state["w"], x), "x": x}, {}

    program = msrl.compile(iteration, state, policy=policy, axes={"w": P(), "x": P("env")})
    if largest < 2e38:
        np.testing.assert_allclose(program.run(state, 1)[0]["w"], -largest, 1 / 255)
    else:
        with pytest.raises(ValueError, match=re.escape("its values are in [-3e+38, 3e+38]")):
            program.run(state, 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_range_of_values_lost_in_a_loop_is_theirs_alone(sign):
    env_step = msrl.fragment(role="env")(lambda x, action: x + 0 * action)
    act = msrl.fragment(role="actor")(lambda w, x: w * x)

    def iteration(state):
        x, _ = jax.lax.scan(lambda x, _: (env_step(x, act(state["w"], x)), None), state["x"], None, length=2)
        return {**state, "x": x}, {}

    state = {"w": jnp.float32(1), "x": sign * jnp.linspace(0.5, 1.5, 8)}
    policy = Packed(SingleLearnerFine(envs=1), Edge("envs", "learners", "uint8"))
    program = msrl.compile(iteration, state, policy=policy, axes={"w": P(), "x": P("env")})
    with pytest.raises(ValueError, match=re.escape("[0.5, 1.5]" if sign > 0 else "[-1.5, -0.5]")):
        program.run(state, 1)


@pytest.mark.parametrize(("choice", "packed"), [({"act": "bfloat16"}, {"act()[0]"}), ({"x": "bfloat16"}, {"state.x"})])
def test_a_codec_for_a_name_packs_no_other_values(choice, packed):
    policy = SingleLearnerCoarse(trajectory_codec=choice)
    program = msrl.compile(toy.iteration, toy.initial_state(), policy=policy, axes=toy.AXES)
    moves = [i for i, _ in walk(program.instructions) if isinstance(i, Move)]
    assert {v.packed.label for i in moves for v in i.results if v.packed} == packed


def test_a_codec_by_name_is_that_codec():
    assert codecs.get("frame_stack(4)").name == codecs.get(codecs.frame_stack(4)).name == "frame_stack(4)"
    image, vector = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 2, 10, 10, 16), (8, 2, 16)))
    takes = [codecs.get(name).takes for name in ("frame_stack(4)", "frame_stack(4, 1)")]
    assert [take(x) for take in takes for x in (image, vector)] == [True, False, False, True]
