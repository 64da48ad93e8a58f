"""What a trace refuses; weak types are promoted as under `jax.jit`, in the first iteration and in later ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from tests.support.same_run import ENVS, EVERYWHERE, SEVERAL, Case, assert_same_run
from tests.support.slow import mostly_slow

apart_or_not = pytest.mark.parametrize("where", mostly_slow(SEVERAL, "SingleLearnerCoarse-4"), ids=str)

act = msrl.fragment(role="actor")(lambda h, s: h + s)
learn = msrl.fragment(role="learner")(lambda h, w: (h * w, w))


def promotion():
    """A weak integer beside int8, and a weak float beside bfloat16."""

    def iteration(s):
        h, w = learn(s["h"], s["w"])
        b = act(s["b"], s["s"])
        return {"s": s["s"] + 1, "b": b, "h": h, "w": w}, {"sum": b, "glue": s["b"] + s["s"]}

    def init():
        return {
            "s": jnp.asarray(100),
            "b": jnp.full(ENVS, 100, jnp.int8),
            "h": jnp.full(ENVS, 3, jnp.bfloat16),
            "w": jnp.asarray(0.5),
        }

    return Case(iteration, init, {"s": P(), "b": P("env"), "h": P("env"), "w": P()}, 3)


WHERE = mostly_slow(EVERYWHERE, "GPUOnly-4", "SingleLearnerCoarse-1")


@pytest.mark.parametrize("where", WHERE, ids=str)
def test_promotion_is_that_of_jit(where):
    program = assert_same_run(promotion, where)
    after, _ = program.run(promotion().init(), 2, chunk=1)
    expected = promotion().init()
    step = jax.jit(promotion().iteration)
    for _ in range(2):
        expected, _ = step(expected)
    assert {k: x.weak_type for k, x in after.items()} == {k: x.weak_type for k, x in expected.items()}


COARSE = policies.SingleLearnerCoarse()


def compiled(iteration, state, policy=COARSE):
    return msrl.compile(iteration, state, policy=policy, devices=jax.devices()[:2])


@pytest.mark.parametrize("policy", [policies.GPUOnly(), COARSE], ids=str)
def test_shapes_keep_weak_types(policy):
    case = promotion()
    program = compiled(case.iteration, jax.eval_shape(case.init), policy)
    _, metrics = program.run(program.initialize(case.init), 1)
    assert metrics["sum"].dtype == np.int8 and metrics["sum"][0, 0] == -56


def harmless():
    """Weak types that change without any effect: a counter made of a Python number, advanced by a strong number."""

    def iteration(s):
        n = s["n"] + jnp.int32(1)
        best = jnp.maximum(s["best"], s["x"].sum())
        total = jax.lax.fori_loop(0, 3, lambda i, c: c + n, s["n"])
        return {"n": n, "best": best, "x": act(s["x"], best)}, {"n": n, "total": total}

    return Case(iteration, lambda: {"n": jnp.asarray(0), "best": jnp.asarray(-1.5), "x": jnp.ones(ENVS)}, None, 3)


@apart_or_not
def test_weak_types_without_any_effect_may_change(where):
    program = assert_same_run(harmless, where)
    state = harmless().init()
    for n in (np.int32(0), jnp.int32(0), 0, jnp.asarray(0)):
        after, _ = program.run(state | {"n": n}, 1)
        assert after["n"] == 1


@pytest.mark.parametrize("policy", [policies.GPUOnly(), COARSE], ids=str)
def test_a_first_iteration_unlike_the_others_is_refused(policy):
    def iteration(s):
        return {"h": s["h"], "s": jnp.int32(7) + s["s"]}, {"m": act(s["h"], s["s"])}

    with pytest.raises(TypeError, match=r"changes state\['s'\] from weak to strong int32\[\].*jnp.asarray\(x, jnp.int32\)"):
        compiled(iteration, {"h": jnp.zeros(4, jnp.int8), "s": jnp.asarray(1)}, policy)


@pytest.mark.parametrize("policy", [policies.GPUOnly(), COARSE], ids=str)
def test_a_state_of_other_weak_types_is_refused_if_jit_would_compute_something_else(policy):
    def iteration(s):
        return s, {"m": act(s["h"], s["s"])}

    h = jnp.full(4, 100, jnp.int8)
    weak, strong = {"h": h, "s": jnp.asarray(100)}, {"h": h, "s": jnp.int32(100)}
    for compiled_for, given, kinds in ((weak, strong, "strong int32.*for a weak"), (strong, weak, "weak int32.*for a strong")):
        program = compiled(iteration, compiled_for, policy)
        expected = jax.jit(iteration)(compiled_for)[1]["m"]
        np.testing.assert_array_equal(program.run(compiled_for, 1)[1]["m"][0], expected)
        for use in (lambda s, p=program: p.run(s, 1), program.place, program):
            with pytest.raises(ValueError, match=rf"state\['s'\] is a {kinds} int32.*jax.jit would"):
                use(given)


def places_changed():
    """Two leaves that swap, so that the weak type moves in every iteration."""

    def iteration(s):
        return {"a": act(s["b"], 0), "b": s["a"], "x": learn(s["x"], s["b"])[0]}, {"sum": s["a"] + s["b"]}

    return Case(iteration, lambda: {"a": jnp.asarray(1), "b": jnp.int32(2), "x": jnp.ones(4, jnp.int32)}, None, 3)


@apart_or_not
def test_weak_types_may_move_between_leaves(where):
    assert_same_run(places_changed, where)


@apart_or_not
def test_python_numbers_and_wide_numpy_arrays_are_what_jit_makes_of_them(where):
    assert_same_run(numbers, where)


def numbers():
    def iteration(s):
        x, (wide, _) = act(s["x"], s["rate"]), learn(s["wide"], s["rate"])
        return s | {"x": x, "wide": wide, "n": s["n"] + 1, "b": ~s["b"]}, {"m": s["b"], "h": s["h"] + s["n"]}

    def init():
        return {
            "x": np.arange(8.0),
            "wide": np.arange(8.0),
            "rate": 0.5,
            "n": 3,
            "b": True,
            "long": np.arange(3),
            "h": jnp.int8(1),
            "one": np.float64(2),
            "c": 1j,
        }

    return Case(iteration, init, None, 3)


def test_integers_that_do_not_fit_are_refused():
    with pytest.raises(OverflowError, match=r"state\['n'\]: .*1099511627776 too large to convert to int32"):
        compiled(lambda s: (s, {}), {"n": 2**40})
    program = compiled(lambda s: (s, {}), {"n": 1})
    with pytest.raises(OverflowError, match=r"state\['n'\]: "):
        program.run({"n": 2**40}, 1)
    with pytest.raises(ValueError, match=r"state\['n'\] is float32\[\], but the program was compiled for int32\[\]"):
        program.run({"n": 2.0}, 1)


def compile_coarse(iteration, state, **options):
    return msrl.compile(iteration, state, policy=msrl.policies.SingleLearnerCoarse(), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"x": s["x"], "y": s["y"][:1]}, r"changes state\['y'\] from float32\[2\] to float32\[1\]"),
        (lambda s: {"x": s["x"].astype(jnp.int32), "y": s["y"]}, r"changes state\['x'\] from float32\[2\] to int32\[2\]"),
        (lambda s: {"x": s["x"]}, r"a state without state\['y'\]"),
        (lambda s: s | {"z": s["x"]}, r"a state with state\['z'\]"),
    ],
)
def test_a_next_state_that_differs_is_named(change, message):
    with pytest.raises(TypeError, match=message):
        compile_coarse(lambda s: (change(s), {}), {"x": jnp.ones(2), "y": jnp.ones(2)})


def test_an_iteration_returns_a_pair():
    with pytest.raises(TypeError, match=r"returned dict, not a pair \(state, metrics\)"):
        compile_coarse(lambda s: s, {"x": jnp.ones(2)})


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"x": P("env")}, "`axes` does not match the state"),
        ({"x": P("env"), "y": P(), "z": P()}, "`axes` does not match the state"),
        ({"x": P("env", None), "y": P()}, r"axes of state\['x'\] name 2 dimensions.*float32\[8\]"),
        ({"x": "env", "y": P()}, r"axes\['x'\] is 'env'.*PartitionSpec"),
    ],
)
def test_axes_that_do_not_match_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        compile_coarse(lambda s: (s, {}), {"x": jnp.ones(8), "y": jnp.ones(8)}, axes=axes)
