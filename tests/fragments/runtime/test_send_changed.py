"""Codecs that send changes: the same bits as all words, fewer bytes, and all words where changes are too many."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import replay
from msrl_jax.fragments import codecs
from msrl_jax.fragments.measure import delayed, named_in_traces
from msrl_jax.policies import Central, SingleLearnerCoarse
from tests.support import toy
from tests.support.compare import assert_close, run_plain

SIZE = 256
AXES = {"table": P(), "bias": P(), "count": P(), "t": P(), "x": P("env")}


@msrl.fragment(role="actor")
def act(table, bias, x):
    return x * bias[0] + table.sum()


@msrl.fragment(role="learner")
def learn(table, bias, count, t, seen):
    # In iteration t the first `count[t]` words change; the mean of what was seen is kept, so that the learner reads it.
    first = jnp.arange(SIZE).reshape(table.shape) < count[t]
    return jnp.where(first, table + 1, table), bias + 0 * seen.mean(), t + 1


def iteration(state):
    """A learner that changes as many words as it was told, and an actor that needs them."""
    seen = act(state["table"], state["bias"], state["x"])
    table, bias, t = learn(state["table"], state["bias"], state["count"], state["t"], seen)
    return {**state, "table": table, "bias": bias, "t": t, "x": seen}, {"sum": seen.sum()}


def start(count):
    table = jnp.zeros((16, SIZE // 16))
    return {"table": table, "bias": jnp.ones(2), "count": jnp.int32(count), "t": jnp.int32(0), "x": jnp.arange(8.0)}


def sent_by(codec, count):
    """The program after as many iterations as `count` has numbers, its metrics, and what it sent."""
    state = start(count)
    program = msrl.compile(iteration, state, policy=SingleLearnerCoarse(parameter_codec=codec), axes=AXES)
    _, metrics = program.run(state, len(count))
    return program, metrics, program.sent


def test_only_changed_words_cross_and_all_of_them_where_these_are_too_many():
    count = [3, 0, 32, 33, 5, 1]  # of 258 words, at most 258 // 8 = 32 cross as changes
    program, metrics, sent = sent_by("delta(8)", count)
    ((name, one),) = sent.items()
    assert name == "0: learners -> actors: state['table']"
    # Of six exchanges the first has nothing to compare with, and the fifth comes after the iteration that changed 33 words.
    assert (one.exchanges, one.compared, one.changed, one.words) == (6, 5, 3 + 0 + 32 + 33 + 5, SIZE + 2)
    assert one.whole == 2
    assert one.nbytes == 2 * (SIZE + 2) * 2 + 4 * 32 * 6
    tables = np.zeros((len(count), SIZE), np.float32)  # what the actor multiplies with: the tables before each iteration
    for t in range(1, len(count)):
        tables[t] = tables[t - 1] + (np.arange(SIZE) < count[t - 1])
    x, sums = np.arange(8.0), []
    for table in tables:
        x = x + table.sum()
        sums.append(x.sum())
    np.testing.assert_array_equal(metrics["sum"], np.float32(sums))
    crossings = {c.value: c for c in program.explain().crossings if c.codec}
    copies = len(program.layout.roles["actor"].devices)
    assert crossings["state['table']"].nbytes == copies * 6 * (SIZE // 8)
    assert crossings["state['table']"].unpacked_bytes == copies * 4 * SIZE


def test_values_that_the_codec_does_not_take_cross_beside_changes():
    """Integers and a key, which the same learner makes and the same actor reads."""

    @msrl.fragment(role="actor")
    def act(table, order, key, x):
        return x + table[order[:8]] + jax.random.randint(key, (8,), 0, 9)

    @msrl.fragment(role="learner")
    def learn(table, order, key, seen):
        return table.at[order[0]].add(1) + 0 * seen.mean(), jnp.roll(order, 1) * 3 % 64, jax.random.split(key, 1)[0]

    def iteration(state):
        x = act(state["table"], state["order"], state["key"], state["x"])
        table, order, key = learn(state["table"], state["order"], state["key"], x)
        return {"table": table, "order": order, "key": key, "x": x}, {"x": x}

    state = {"table": jnp.zeros(64), "order": jnp.arange(64), "key": jax.random.key(3), "x": jnp.zeros(8)}
    axes = {"table": P(), "order": P(), "key": P(), "x": P("env")}
    program = msrl.compile(iteration, state, policy=SingleLearnerCoarse(parameter_codec="delta(8)"), axes=axes)
    assert_close(program.run(state, 4), run_plain(iteration, state, 4), rtol=0, atol=0)
    (sent,) = program.sent.values()
    assert (sent.words, sent.changed, sent.whole) == (64, 3, 1)


def test_all_words_cross_every_so_many_exchanges():
    _, _, sent = sent_by("delta(8, 3)", [1] * 7)
    (one,) = sent.values()
    assert (one.exchanges, one.whole) == (7, 3)  # the first, fourth and seventh


POLICIES = [
    (SingleLearnerCoarse, {"parameter_codec": "delta(4, 2)", "staleness": 1}, {"parameter_codec": "bfloat16", "staleness": 1}),
    (Central, {"parameter_codec": "delta"}, {"parameter_codec": "bfloat16"}),
]


@pytest.mark.parametrize(("policy", "changes", "whole"), POLICIES, ids=["stale", "central"])
def test_what_arrives_is_what_bfloat16_gives_bit_by_bit(policy, changes, whole):
    state = toy.initial_state()
    a, b = (msrl.compile(toy.iteration, state, policy=policy(**c), axes=toy.AXES) for c in (changes, whole))
    assert_close(a.run(state, 4), b.run(state, 4), rtol=0, atol=0)
    assert a.sent and not b.sent


@pytest.mark.parametrize(("before", "after"), [(0.0, -0.0), (1.0, np.nan)])
def test_words_are_compared_as_bits(before, after):
    @msrl.fragment(role="learner")
    def flip(w, seen):
        return w.at[1].set(after) + 0 * jnp.nan_to_num(seen).mean()

    @msrl.fragment(role="actor")
    def read(w, x):
        return x * 0 + jnp.copysign(1.0, w[1]) * jnp.where(jnp.isnan(w[1]), 7.0, 1.0)

    def step(state):
        x = read(state["w"], state["x"])
        w = flip(state["w"], x)
        # -0.0 + 0 is 0.0, so the sum in the learner hides the sign.
        return {"w": w.at[1].set(after), "x": x}, {"x": x[0]}

    state = {"w": jnp.full(64, before), "x": jnp.zeros(8)}
    program = msrl.compile(step, state, policy=SingleLearnerCoarse(parameter_codec="delta"), axes={"w": P(), "x": P("env")})
    _, metrics = program.run(state, 2)
    assert metrics["x"][1] == np.copysign(1.0, after) * (7.0 if np.isnan(after) else 1.0)
    (one,) = program.sent.values()
    assert (one.changed, one.whole) == (1, 1)


def test_an_exchange_that_fails_is_followed_by_a_whole_one():
    state = start([1] * 4)
    program = msrl.compile(iteration, state, policy=SingleLearnerCoarse(parameter_codec="delta(8)"), axes=AXES)
    program.run(state, 2)
    (sender,) = program.host_loop.executor().senders
    place, sender._place = sender._place, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        program.run(state, 1)
    sender._place = place
    before = sender.stats.whole
    after, _ = program.run(state, 3)
    assert sender.stats.whole == before + 1
    np.testing.assert_array_equal(after["table"], 3.0 * (np.arange(SIZE) < 1).reshape(16, -1))


REFUSED = [
    (lambda: codecs.delta(2), ValueError, r"delta\(2, 100\): one_in must be at least 4"),
    (lambda: codecs.get("delta(8, 0)"), ValueError, "every at least 1"),
    (lambda: sent_trajectory(), ValueError, r"sends the changes of values that are whole on each device, but .* is split"),
    (lambda: sent_by_shards(), ValueError, r"is split over devices on its way from .*\. Use 'bfloat16', or"),
    (lambda: stored(), ValueError, "delta is only for sending; use one of"),
]


def sent_trajectory():
    state = toy.initial_state()
    policy = SingleLearnerCoarse(trajectory_codec="delta")
    return msrl.compile(toy.iteration, state, policy=policy, axes=toy.AXES).run(state, 1)


def sent_by_shards():
    state = toy.initial_state()
    policy = Central(shards=2, parameter_codec="delta")
    return msrl.compile(toy.iteration, state, policy=policy, axes=toy.AXES).run(state, 1)


def stored():
    sizes = {"capacity": 8, "num_envs": 1, "unroll_length": 1, "batch_size": 1}
    return replay.uniform({"obs": jnp.zeros(4)}, storage={"obs": "delta"}, **sizes)


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED)
def test_what_cannot_be_sent_by_changes_is_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_every_transfer_is_counted_also_within_contexts():
    state = toy.initial_state()
    program = msrl.compile(toy.iteration, state, policy=Central(parameter_codec="delta"), axes=toy.AXES)
    program.run(state, 2)
    before = [one.exchanges for one in program.sent.values()]
    assert len(before) == len(program.host_loop.executor().senders) > 1
    with delayed(program, 0.0), named_in_traces(program):
        program.run(state, 2)
    assert [one.exchanges for one in program.sent.values()] == [2 * n for n in before]


def test_changes_are_of_words_of_16_bits():
    state = start([1])
    wide = dataclasses.replace(codecs.SCALED_UINT8, name="wide", changes=codecs.Changes(8, 5))
    with pytest.raises(ValueError, match=r"'wide' sends the changes of words of 16 bits, but packs state.* into uint8"):
        msrl.compile(iteration, state, policy=SingleLearnerCoarse(parameter_codec=wide), axes=AXES).warm_up()
