"""Misuse raises an error before it computes anything wrong or ends the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from tests.support.same_run import ENVS

BOTH = pytest.mark.parametrize("policy", [policies.GPUOnly(), policies.SingleLearnerCoarse(staleness=1)], ids=str)
act = msrl.fragment(role="actor", name="act")(lambda x, w: x + w)
learn = msrl.fragment(role="learner", name="learn")(lambda w, x: w + x.mean())


def iteration(s):
    x = act(s["x"], s["w"])
    return {"x": x, "w": learn(s["w"], x)}, {"sum": x.sum()}


def init():
    return {"x": jnp.arange(8.0), "w": jnp.float32(1)}


AXES = {"x": P("env"), "w": P()}


def compiled(policy, fn=iteration, devices=4):
    return msrl.compile(fn, init(), policy=policy, axes=AXES, devices=jax.devices()[:devices])


@BOTH
def test_a_donated_state_is_refused_by_name(policy):
    program = compiled(policy)
    state = program.place(init())
    program.run(state, 1, donate=True)
    given = program.unwrap(state)
    lost = next(k for k in ("w", "x") if given[k].is_deleted())
    for use in (
        lambda: program.run(state, 1),
        lambda: program.run(state, 1, donate=True),
        lambda: program(state),
        lambda: program.place(state),
    ):
        with pytest.raises(RuntimeError, match=rf"state\['{lost}'\].* no longer has memory: .*donate=True.*donate=False"):
            use()


@pytest.mark.parametrize("dtype", [">f4", "U2", object])
def test_an_array_of_a_dtype_that_jax_lacks_is_refused_with_the_remedy(dtype):
    state = init() | {"x": np.zeros(8, dtype)}
    with pytest.raises(TypeError, match=r"state\['x'\] has dtype .*, which JAX does not have; convert it, as in x.astype"):
        msrl.compile(iteration, state, policy=policies.GPUOnly(), axes=AXES)


def test_a_masked_array_is_refused_with_the_remedy():
    x = np.ma.masked_array(np.zeros(8, np.float32), mask=True)
    with pytest.raises(ValueError, match=r"state\['x'\] is a masked array, which JAX does not have; use its filled"):
        msrl.compile(iteration, init() | {"x": x}, policy=policies.GPUOnly(), axes=AXES)
    with pytest.raises(TypeError, match="argument x is a masked array, which JAX does not have; use its filled"):
        msrl.fragment(role="actor")(lambda x: x)(x)


@BOTH
def test_disabled_jit_is_refused(policy):
    program = compiled(policy)
    with jax.disable_jit():
        for use in (lambda: compiled(policy), lambda: program.run(init(), 1), lambda: program(init())):
            with pytest.raises(RuntimeError, match=r"jax.disable_jit is on.*call the iteration itself"):
                use()
    program.run(init(), 1)


def own_mesh(devices, spec="d"):
    mesh = Mesh(np.array(devices), ("d",))

    @msrl.fragment(role="actor", name="own")
    def own(x, w):
        return jax.shard_map(lambda y: y * 2, mesh=mesh, in_specs=P(spec), out_specs=P(spec))(x) + w

    def iteration(s):
        x = own(s["x"], s["w"])
        return {"x": x, "w": learn(s["w"], x)}, {"sum": x.sum()}

    return iteration


def constrained(devices):
    mesh = Mesh(np.array(devices), ("d",))

    @msrl.fragment(role="actor", name="own")
    def own(x, w):
        return jax.lax.with_sharding_constraint(x * w, NamedSharding(mesh, P("d")))

    return lambda s: ({"x": own(s["x"], s["w"]), "w": learn(s["w"], s["x"])}, {})


@pytest.mark.parametrize("make", [own_mesh, constrained])
def test_an_own_mesh_that_is_not_the_placement_is_refused(make):
    devices = jax.devices()
    for others in (devices[:2], devices[3::-1], devices[4:]):
        with pytest.raises(ValueError, match=r"'own' has a `\w+` over its own mesh, \[cpu:.*places it at actors\[cpu:0, "):
            compiled(policies.MultiLearner(), make(others))


@pytest.mark.parametrize("policy", [policies.MultiLearner(), policies.SingleLearnerCoarse(learners=4)])
def test_an_own_mesh_of_the_devices_of_the_placement_is_the_same_run(policy):
    """Its axes have other names than those of the placement, and XLA may express shardings in either."""
    fn = own_mesh(jax.devices()[:4])
    found = compiled(policy, fn, devices=8 if isinstance(policy, policies.SingleLearnerCoarse) else 4).run(init(), 2)
    state, sums = init(), []
    for _ in range(2):
        x = state["x"] * 2 + state["w"]
        state = {"x": x, "w": state["w"] + x.mean()}
        sums.append(x.sum())
    np.testing.assert_allclose(found[0]["x"], state["x"])
    np.testing.assert_allclose(found[0]["w"], state["w"])
    np.testing.assert_allclose(found[1]["sum"], sums)


@msrl.fragment(role="actor", name="checked")
def checked(x, w):
    checkify.check((x < 100).all(), "x is {m}", m=x.max())
    return x * 4 + w


def checked_iteration(s):
    def both(x, w):
        x = checked(x, w)
        return x, learn(w, jnp.log(x))

    errors, (x, w) = checkify.checkify(both, errors=checkify.user_checks | checkify.nan_checks)(s["x"], s["w"])
    return {"x": x, "w": w}, {"errors": errors}


@pytest.mark.parametrize("policy", [policies.GPUOnly(), policies.SingleLearnerCoarse()], ids=str)
def test_checks_in_fragments_report_what_failed(policy):
    program, step = compiled(policy, checked_iteration, devices=3), jax.jit(checked_iteration)
    assert {"checked", "learn"} <= {f.name for f in program.explain().fragments}
    state, expected = init(), init()
    said = []
    for _ in range(4):
        state, metrics = program(state)
        expected, reference = step(expected)
        np.testing.assert_allclose(state["x"], expected["x"])
        assert (metrics["errors"].get() or "").split(" (")[0] == (reference["errors"].get() or "").split(" (")[0]
        said.append(metrics["errors"].get())
    assert said[0] is None and said[-1].startswith("x is ")
    state, metrics = program(init() | {"x": jnp.full(ENVS, -9.0)})
    assert "nan generated by primitive: log" in metrics["errors"].get()
