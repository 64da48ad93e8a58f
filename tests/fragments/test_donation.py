"""Donated memory: arrays that a user still holds stay valid, even if they share memory with donated ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from msrl_jax.fragments.passes.instructions import RunProgram
from msrl_jax.fragments.runtime.executables import Executables, Request
from tests.support.compare import as_numpy, assert_close, run_plain
from tests.support.same_run import ENVS, EVERYWHERE
from tests.support.slow import mostly_slow

act = msrl.fragment(role="actor")(lambda w, x: x * w)
learn = msrl.fragment(role="learner")(lambda w, x: w + x.mean())


def iteration(s):
    """Passes a leaf through, returns one array as two leaves and as a metric, and swaps two others."""
    x = act(s["w"], s["x"])
    after = {"w": learn(s["w"], x), "x": x, "again": x, "kept": s["kept"], "a": s["b"], "b": s["a"]}
    return after, {"x": x, "kept": s["kept"], "old": s["x"], "sum": x.sum()}


def init():
    x = jnp.arange(8.0)
    return {"w": jnp.float32(0.5), "x": x, "again": x, "kept": x, "a": jnp.ones(3), "b": jnp.zeros(3)}


AXES = {"w": P(), "x": P("env"), "again": P("env"), "kept": P("env"), "a": P(), "b": P()}
STALE = policies.SingleLearnerCoarse(staleness=1)


EACH_TIME = ("GPUOnly-1", "MultiLearner-4", "SingleLearnerCoarse-4")


@pytest.fixture(scope="module", params=mostly_slow([*EVERYWHERE[:2], *EVERYWHERE[6:]], *EACH_TIME), ids=str)
def program(request):
    where = request.param
    return msrl.compile(iteration, init(), policy=where.policy, axes=AXES, devices=jax.devices()[: where.devices])


def plain(state, iterations):
    rows = []
    for _ in range(iterations):
        state, metrics = jax.jit(iteration)(state)
        rows.append(metrics)
    return state, rows


def test_calls_leave_everything_valid(program):
    expected = [plain(init(), n) for n in (1, 2, 3)]
    start = program.place(init())
    one, first = program(start)
    two, second = program(one)
    program.run(program.place(one), 2, donate=True)
    three, _ = program.run(two, 1, donate=True)  # `two` is given away, and nothing else
    assert all(x.is_deleted() for k, x in two.items() if k == "w")
    for found, (state, rows) in zip((one, three), (expected[0], expected[2]), strict=True):
        assert_close(found, state)
        assert_close([first, second], plain(init(), 2)[1])
        assert len(rows)
    assert_close(start, init())


def test_one_array_in_many_places_is_donated_once(program):
    for donate in (False, True):
        x = jnp.arange(8.0)
        state = program.place(init()) | {"x": x, "again": x, "kept": x}
        found, metrics = program.run(state, 2, donate=donate)
        expected, rows = plain(init(), 2)
        assert_close(found, expected)
        assert_close(metrics, jax.tree.map(lambda *r: np.stack(r), *as_numpy(rows)))
        shards = [shard.data for k in ("x", "again", "kept") for shard in found[k].addressable_shards]
        assert len({x.unsafe_buffer_pointer() for x in shards}) == len(shards)


def test_numpy_memory_is_never_written_to(program):
    x = np.arange(ENVS, dtype=np.float32)
    program.run(init() | {"x": x, "again": x, "kept": x}, 2, donate=True)
    np.testing.assert_array_equal(x, np.arange(ENVS))
    after, metrics = program(init() | {"x": x, "kept": x})
    x[:] = -1
    assert_close(after["kept"], jnp.arange(8.0))
    assert_close(metrics["kept"], jnp.arange(8.0))


def test_numpy_memory_is_the_callers_again_once_a_call_returns():
    """A large array, of which the copy takes long, at an address that JAX could use as it is."""
    memory = np.empty(2**24 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    x = memory[start : start + 2**24].view(np.float32)
    step = msrl.fragment(role="actor")(lambda x: x.sum())
    program = msrl.compile(lambda s: (s, {"sum": step(s["x"])}), {"x": x}, policy=policies.GPUOnly(), devices=jax.devices()[:1])
    for take in (program.place, lambda state: program(state)[0], lambda state: program.run(state, 1, donate=True)[0]):
        x[:] = 1
        state = take({"x": x})
        x[:] = -1
        assert (np.asarray(state["x"]) == 1).all()


@pytest.mark.parametrize("where", [EVERYWHERE[0], EVERYWHERE[-1]], ids=str)
def test_a_captured_numpy_array_may_change_after_compiling(where):
    memory = np.ones(2**16 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4  # an address that JAX could use as it is
    factor = memory[start : start + 2**16]
    act = msrl.fragment(role="actor")(lambda w: w * factor)
    learn = msrl.fragment(role="learner")(lambda w, x: w + x.mean())
    program = msrl.compile(
        lambda s: ({"w": learn(s["w"], act(s["w"]))}, {}),
        {"w": jnp.float32(1)},
        policy=where.policy,
        devices=jax.devices()[: where.devices],
    )
    factor[:] = 7
    assert program.run({"w": jnp.float32(1)}, 2)[0]["w"] == 4


def test_donated_registers_are_refused():
    program = msrl.compile(iteration, init(), policy=STALE, axes=AXES, devices=jax.devices()[:3])
    state, _ = program.run(init(), 2)
    next_state, metrics = program(state)
    assert isinstance(next_state, msrl.fragments.Delayed) and metrics["sum"].shape == ()
    program.run(state, 1, donate=True)
    spent = state.registers
    fresh = program.run(init(), 2)[0]
    with pytest.raises(RuntimeError, match=r"a register of stale parameters no longer has memory"):
        program.run(fresh._replace(registers=spent), 1)


def test_equal_programs_that_donate_otherwise_are_not_shared(devices):
    executables = Executables()
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(Mesh(devices[:1], ("d",)), P()))

    def add(x):
        return (x + 1,)

    keeps = executables.compile(Request("add", add, [x]))
    consumes = executables.compile(Request("add", add, [x], (0,)))
    assert executables.compile(Request("add", add, [x])) is keeps and executables.count == 2
    array = jax.device_put(jnp.ones(4), devices[0])
    keeps(array)
    assert not array.is_deleted()
    consumes(array)
    assert array.is_deleted()


class Overlapping:
    """The learner's device is one of the environments' two."""

    def layout(self, devices, sizes):
        places = {role: policies.Placement.over(role, devices[:n]) for role, n in (("env", 2), ("learner", 1))}
        return policies.Layout(places, policy="Overlapping()")


def test_a_transfer_between_placements_that_share_a_device_shares_no_memory(devices):
    """The environments' program may overwrite what it gets; the learner still has its own."""
    overwrite = msrl.fragment(role="env")(lambda w: w * 2)
    keep = msrl.fragment(role="learner")(lambda w, y: w + 0 * y)

    def iteration(state):
        return {"w": keep(state["w"], overwrite(state["w"]))}, {}

    state = {"w": jnp.arange(1024.0)}
    program = msrl.compile(iteration, state, policy=Overlapping(), axes={"w": P()}, devices=devices)
    after, _ = program.run(state, 2)
    assert_close(after, state)
    run = next(i for i in program.instructions if isinstance(i, RunProgram) and i.placement.name == "env")
    assert run.donated == (0,)


def test_memory_of_a_part_is_not_given_for_a_whole_result(devices):
    """An array that is split over devices has no room for a result of its shape that each device holds whole."""
    gather = msrl.fragment(role="env")(lambda x: x + 1)
    keep = msrl.fragment(role="learner")(lambda w, x: w + x.mean())

    def iteration(state):
        y = gather(state["x"])
        return {"x": state["y"], "y": y, "w": keep(state["w"], y)}, {}

    state = {"w": jnp.float32(1), "x": jnp.arange(8.0), "y": jnp.ones(8)}
    axes = {"w": P(), "x": P("env"), "y": P()}
    program = msrl.compile(iteration, state, policy=policies.SingleLearnerCoarse(actors=4), axes=axes, devices=devices)
    assert_close(program.run(state, 2), run_plain(iteration, state, 2))  # JAX warns of donated memory without a use
