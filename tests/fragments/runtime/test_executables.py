"""Programs are compiled once, cost no more than written by hand, say what is wrong, and draw JAX's random bits."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import RunProgram
from msrl_jax.fragments.runtime.cpu_lowering import lower_jitted, threefry2x32
from msrl_jax.fragments.runtime.executables import Executables, Request
from tests.support import processes, toy
from tests.support.compare import assert_close, run_plain


def test_errors_of_programs_whose_arguments_xla_may_split_are_shown():
    def fails(x):
        raise ValueError("no such operation")

    with pytest.raises(ValueError, match="no such operation"):
        Executables().compile(Request("key", fails, [jax.ShapeDtypeStruct((2,), jnp.float32)]))


def test_a_fragment_used_twice_is_compiled_once():
    @msrl.fragment(role="actor")
    def squash(x):
        return jnp.tanh(x) @ jnp.ones((4, 4))

    @msrl.fragment(role="learner")
    def shift(x):
        return x + 1

    def iteration(x):
        return squash(shift(squash(x))), {}

    state = jnp.ones((8, 4))
    program = msrl.compile(iteration, state, policy=msrl.policies.SingleLearnerCoarse(actors=1), axes=P())
    names = [i.name for i in program.instructions if isinstance(i, RunProgram)]
    assert names == ["squash", "shift", "squash"]
    after, metrics = program.run(state, 2)
    assert program.executables.count == 2 and metrics == {}
    assert_close(after, run_plain(lambda x: (iteration(x)[0], {"_": x[0, 0]}), state, 2)[0])


def test_fused_program_costs_no_more_than_the_handwritten_scan(devices):
    """Invariant: GPUOnly is `jit(scan(iteration))`, in results, FLOPs and bytes."""
    state = toy.initial_state()
    program = msrl.compile(toy.iteration, state, policy=msrl.policies.GPUOnly(), axes=toy.AXES, devices=devices[:1])
    program.warm_up(3)

    @jax.jit
    def handwritten(state):
        return jax.lax.scan(lambda s, _: toy.iteration(s), state, None, length=3)

    reference = lower_jitted(handwritten, state)()  # with the random bits of programs
    (fused,) = program.compiled(3)
    ours = fused.cost_analysis()
    theirs = reference.cost_analysis()
    assert ours["flops"] <= theirs["flops"]
    assert ours["bytes accessed"] <= theirs["bytes accessed"]
    expected, metrics = reference(state)
    after, stacked = program.run(state, 3)
    for x, y in zip(jax.tree.leaves((after.params, stacked)), jax.tree.leaves((expected.params, metrics)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# Known-answer tests of Random123 1.14 (kat_vectors): counters, keys, results.
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_answers(counter, key, expected):
    got = threefry2x32(*(jnp.uint32(x) for x in (*key, *counter)))
    assert tuple(int(x) for x in got) == expected


DRAW = """
import jax, numpy as np
def draw(key):
    keys = jax.random.split(key, 3)
    return (
        jax.random.bits(key, (7,)), jax.random.bits(key, (3, 5), "uint16"), jax.random.uniform(keys[0], (33,)),
        jax.random.normal(keys[1], (4, 3)), jax.random.permutation(keys[2], 10), jax.random.key_data(keys),
        jax.vmap(jax.random.uniform)(keys), jax.random.key_data(jax.random.fold_in(key, 5)),
    )
drawn = [jax.jit(draw)(jax.random.key(seed)) for seed in (0, 1, 2**31 + 7)]
"""


@pytest.mark.long
def test_numbers_are_those_of_jax_alone(tmp_path):
    check = "import sys; assert 'msrl_jax' not in sys.modules"
    code = f"{DRAW}\n{check}; np.savez({str(tmp_path / 'x.npz')!r}, *jax.tree.leaves(drawn))"
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    namespace = {}
    exec(DRAW, namespace)
    program = lower_jitted(jax.jit(namespace["draw"]), jax.random.key(0))()
    namespace["drawn"] = [program(jax.random.key(seed)) for seed in (0, 1, 2**31 + 7)]
    with np.load(tmp_path / "x.npz") as alone:
        for mine, name in zip(jax.tree.leaves(namespace["drawn"]), alone, strict=True):
            np.testing.assert_array_equal(mine, alone[name])


@pytest.mark.parametrize("draw", [lambda k: jax.random.bits(k, (16,)), lambda k: jax.random.split(k, 4), jax.random.uniform])
def test_the_compiled_program_has_no_loop(draw):
    key = jax.device_put(jax.random.key(0), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    spec = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=key.sharding)
    program = Executables().compile(Request("draw", lambda key: (draw(key),), [spec]))
    assert " while(" not in program.as_text()


@pytest.mark.long
def test_other_programs_of_the_process_stay_as_jax_compiles_them():
    code = """
import jax
def text():
    return jax.jit(lambda key: jax.random.bits(key, (16,))).lower(jax.random.key(0)).as_text()
before = text()
import msrl_jax as msrl
assert text() == before
iteration, state = lambda key: (jax.random.split(key)[0], jax.random.uniform(key)), jax.random.key(1)
msrl.compile(iteration, state, policy=msrl.policies.GPUOnly()).run(state, 2)
jax.clear_caches()
assert text() == before and "while" in before
"""
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
