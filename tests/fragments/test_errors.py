"""Bad input is refused before anything compiles, with a message that names the place and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.runtime.executables import Executables
from msrl_jax.policies import Layout, Placement

from . import toy

COARSE = msrl.policies.SingleLearnerCoarse()


@msrl.fragment(role="actor")
def act(x):
    return x + 1


@msrl.fragment(role="learner")
def fit(x):
    return x * 2


def compile_(iteration, state, policy=COARSE, **options):
    return msrl.compile(iteration, state, policy=policy, **options)


def test_a_leaf_that_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"state\['name'\] is a str, not an array"):
        compile_(lambda s: (s, {}), {"x": jnp.ones(2), "name": "ppo"})


def test_a_mutable_reference_is_refused():
    with pytest.raises(TypeError, match=r"state\['x'\] is a mutable reference"):
        compile_(lambda s: (s, {}), {"x": jax.new_ref(jnp.ones(2))})


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
        compile_(lambda s: (change(s), {}), {"x": jnp.ones(2), "y": jnp.ones(2)})


def test_an_iteration_returns_a_pair():
    with pytest.raises(TypeError, match=r"returned dict, not a pair \(state, metrics\)"):
        compile_(lambda s: s, {"x": jnp.ones(2)})


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
        compile_(lambda s: (s, {}), {"x": jnp.ones(8), "y": jnp.ones(8)}, axes=axes)


def test_environments_that_do_not_divide_are_refused():
    state = {"x": jnp.ones(6)}
    policy = msrl.policies.SingleLearnerCoarse(actors=4)
    with pytest.raises(ValueError, match=r"num_envs=6 cannot be split over the 4 devices of placement 'actors'.*1 or 2 or 3"):
        compile_(lambda s: ({"x": fit(act(s["x"]))}, {}), state, policy, axes={"x": P("env")})
    state = {"x": jnp.ones(16), "groups": jnp.ones((2, 8))}
    with pytest.raises(ValueError, match=r"axis 'env' of state\['groups'\], which is of size 2, cannot be split over the 4"):
        compile_(lambda s: ({**s, "x": fit(act(s["x"]))}, {}), state, policy, axes={"x": P("env"), "groups": P("env")})


@pytest.mark.parametrize(
    "policy",
    [
        msrl.policies.GPUOnly(num_devices=9),
        msrl.policies.MultiLearner(num_devices=16),
        msrl.policies.SingleLearnerCoarse(actors=8, learners=1),
        msrl.policies.SingleLearnerFine(learners=8),
        msrl.policies.Environments(envs=8, agents=1),
        msrl.policies.Central(workers=7, shards=2),
    ],
    ids=lambda p: type(p).__name__,
)
def test_more_devices_than_there_are_is_refused(policy):
    with pytest.raises(ValueError, match=r"there are [78]|there are 0"):
        compile_(lambda s: (s, {}), {"x": jnp.ones(8)}, policy)


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_device_counts_are_positive_integers(count):
    with pytest.raises(ValueError, match=r"actors=.* must be an integer of at least 1"):
        compile_(lambda s: (s, {}), {"x": jnp.ones(8)}, msrl.policies.SingleLearnerCoarse(actors=count))


def test_a_cond_over_two_placements_is_refused():
    def iteration(s):
        return jax.lax.cond(s.sum() > 0, lambda x: act(x), lambda x: fit(x), s), {}

    with pytest.raises(ValueError, match=r"`cond` spans placements: fragment 'fit'.*learners.*'act'.*actors.*jnp.where"):
        compile_(iteration, jnp.ones(4))
    after, _ = compile_(iteration, jnp.ones(4), msrl.policies.GPUOnly()).run(jnp.ones(4), 1)
    np.testing.assert_array_equal(after, 2.0 * np.ones(4))


def test_a_while_over_two_placements_is_refused():
    def iteration(s):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: fit(act(x)), s), {}

    with pytest.raises(ValueError, match=r"`while` loop spans placements.*scan or fori_loop"):
        compile_(iteration, jnp.ones(4))


def test_a_role_without_a_placement_is_named():
    class OnlyActors:
        def layout(self, devices, sizes):
            return Layout({"actor": Placement.over("actors", devices[:1])}, policy="OnlyActors()")

    with pytest.raises(ValueError, match=r"'fit' has role 'learner', for which policy OnlyActors\(\) has no placement"):
        compile_(lambda s: (fit(act(s)), {}), jnp.ones(4), OnlyActors())


def test_unknown_policies_and_parameters_suggest_the_nearest():
    with pytest.raises(ValueError, match=r"unknown policy 'SingleLearnerCourse' \(did you mean 'SingleLearnerCoarse'"):
        msrl.policies.get("SingleLearnerCourse")
    with pytest.raises(ValueError, match=r"has no parameter 'learner' \(did you mean 'learners'"):
        msrl.policies.get("SingleLearnerCoarse", learner=2)
    with pytest.raises(TypeError, match="no distribution policy"):
        msrl.policies.get(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [msrl.policies.GPUOnly(), COARSE], ids=lambda p: type(p).__name__)
def test_runs_are_positive_and_states_fit(policy):
    program = msrl.compile(toy.iteration, toy.initial_state(), policy=policy, axes=toy.AXES)
    for iterations in (0, -3, 2.5):
        with pytest.raises(ValueError, match=r"iterations=.* must be an integer of at least 1"):
            program.run(toy.initial_state(), iterations)
    with pytest.raises(ValueError, match=r"state\.x is float32\[4, 2\], but the program was compiled for float32\[16, 2\]"):
        program.run(toy.initial_state()._replace(x=jnp.ones((4, 2))), 1)
    with pytest.raises(ValueError, match="compiled for a state"):
        program.run({"x": jnp.ones(2)}, 1)


def test_plans_need_no_data():
    """A state of shapes is enough to compile and to explain."""
    shapes = jax.eval_shape(toy.initial_state)
    program = msrl.compile(toy.iteration, shapes, policy=COARSE, axes=toy.AXES)
    assert program.explain().bytes_crossing > 0


def test_numpy_states_run():
    state = toy.initial_state()._replace(x=np.zeros((toy.ENVS, 2), np.float32))
    for policy in (msrl.policies.GPUOnly(), COARSE):
        program = msrl.compile(toy.iteration, state, policy=policy, axes=toy.AXES)
        kept, _ = program.run(state, 1)
        given, _ = program.run(program.place(state)._replace(x=state.x), 1, donate=True)
        np.testing.assert_array_equal(kept.x, given.x)
        assert not state.x.any()  # the caller's memory is not written to


def test_errors_of_programs_whose_arguments_xla_may_split_are_shown():
    def fails(x):
        raise ValueError("no such operation")

    with pytest.raises(ValueError, match="no such operation"):
        Executables().compile("key", fails, [jax.ShapeDtypeStruct((2,), jnp.float32)], (), None)


class NoLayout:
    def layout(self, devices, sizes):
        return None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "GPUOnly"}, TypeError, r"policy='GPUOnly' is no policy.*policies\.get\('GPUOnly'\)"),
        ({"policy": None}, TypeError, "policy=None is no policy"),
        ({"policy": msrl.policies.GPUOnly}, TypeError, "is no policy"),
        ({"policy": NoLayout()}, TypeError, r"layout\(\.\.\.\) returned None"),
        ({"devices": ["cpu:0"]}, TypeError, r"devices holds 'cpu:0'.*jax\.devices\(\)"),
        ({"groups": 4}, TypeError, "groups=4 must map"),
        ({"groups": {"env": 0}}, ValueError, r"groups\['env'\]=0 must be an integer of at least 1"),
        ({"groups": {"env": -2}}, ValueError, "of at least 1"),
        ({"groups": {"env": True}}, ValueError, "of at least 1"),
        ({"groups": {"env": 3}}, ValueError, r"groups\['env'\]=3 does not divide the 8 entries of state"),
        ({"groups": {"emv": 2}}, ValueError, "axis 'emv', which no leaf of the state has.*'env'"),
        ({"axes": P(1)}, ValueError, "axes of state hold 1; name logical axes by text"),
    ],
)
def test_options_that_are_none_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        msrl.compile(lambda s: (s, {}), jnp.ones(8), **{"policy": COARSE, "axes": P("env"), **options})


@pytest.mark.parametrize("field", ["actors", "learners", "buffers"])
def test_booleans_are_no_numbers_of_devices(field):
    with pytest.raises(ValueError, match=f"{field}=True"):
        compile_(lambda s: (s, {}), jnp.ones(8), msrl.policies.SingleLearnerCoarse(**{field: True}))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_programs_are_no_traced_functions(transform):
    program = compile_(lambda s: (fit(act(s)), {"m": s.sum()}), jnp.ones(8), msrl.policies.GPUOnly(1))
    with pytest.raises(TypeError, match=r"a program is no function of traced arrays: .*Call it on arrays"):
        transform(lambda s: program(s)[0].sum())(jnp.ones((2, 8)) if transform is jax.vmap else jnp.ones(8))
    with pytest.raises(TypeError, match="no function of traced arrays"):
        transform(lambda s: program.run(s, 1)[0].sum())(jnp.ones((2, 8)) if transform is jax.vmap else jnp.ones(8))


def test_a_mesh_around_a_program_is_refused():
    iteration, state = lambda s: (fit(act(s)), {}), jnp.ones(8)
    program = compile_(iteration, state)
    with jax.set_mesh(jax.make_mesh((4,), ("d",))):
        for call in (lambda: program.run(state, 1), lambda: program(state), lambda: program.place(state)):
            with pytest.raises(RuntimeError, match=r"jax\.set_mesh has set .*Leave the context"):
                call()
        with pytest.raises(RuntimeError, match="Leave the context"):
            compile_(iteration, state)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("policy", [msrl.policies.GPUOnly(1), msrl.policies.GPUOnly(), COARSE], ids=str)
def test_metrics_may_be_written_to(policy, chunk):
    program = compile_(lambda s: (fit(act(s)), {"m": s.sum(), "key": jax.random.key(0)}), jnp.ones(8), policy, axes=P("env"))
    _, metrics = program.run(jnp.ones(8), 3, chunk=chunk)
    metrics["m"] *= 2
    np.testing.assert_array_equal(metrics["m"], [16, 64, 160])


def test_a_state_that_was_deleted_says_so():
    program = compile_(lambda s: (fit(act(s)), {}), jnp.ones(8))
    state = program.place(jnp.ones(8))
    state.delete()
    with pytest.raises(RuntimeError, match=r"state has no memory.*donate_argnums or delete\(\) took it, perhaps in a callback"):
        program.run(state, 1)
