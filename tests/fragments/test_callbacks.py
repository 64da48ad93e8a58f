"""Host callbacks in fragments: every device holds what the host computed, wherever the fragment runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from tests.support.same_run import ENVS, EVERYWHERE, SEVERAL, Case, assert_same_run
from tests.support.slow import mostly_slow, slow_unless


def on_host(fn, x):
    return jax.pure_callback(
        lambda v: fn(np.asarray(v)).astype(v.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    )


@msrl.fragment(role="actor")
def plan(x):
    return on_host(lambda v: v + 1, x)


@msrl.fragment(role="actor")
def plan_each(x):
    return jax.vmap(lambda v: on_host(lambda v: v * 2, v))(x)


@msrl.fragment(role="env")
def simulate(x):
    return io_callback(lambda v: np.asarray(v) * np.float32(0.5), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@msrl.fragment(role="learner")
def fit(w, x):
    return w + on_host(np.sin, x).mean(), x * 2 - w


def kinds_of_callbacks():
    def iteration(s):
        x = plan_each(simulate(plan(s["x"])))
        w, y = fit(s["w"], x)
        return {"x": jnp.tanh(y), "w": w}, {"x": x, "y": y.sum(), "planned": plan(y)}

    return Case(iteration, lambda: {"x": jnp.arange(8.0), "w": jnp.float32(1)}, {"x": P("env"), "w": P()})


def planner_in_a_scan():
    @msrl.fragment(role="env")
    def step(x, a):
        return 0.5 * x + a

    def iteration(s):
        def body(x, _):
            a = plan(x)
            return step(x, a), (a, x.sum())

        x, (actions, sums) = jax.lax.scan(body, s["x"], None, length=2)
        w, _ = fit(s["w"], actions[-1])
        return {"x": x, "w": w}, {"actions": actions, "sums": sums}

    return Case(iteration, lambda: {"x": jnp.arange(8.0), "w": jnp.float32(1)}, {"x": P("env"), "w": P()})


WHERE = mostly_slow(EVERYWHERE, "MultiLearner-4", "SingleLearnerFine-4", "SingleLearnerCoarse-1")


@pytest.mark.parametrize("where", WHERE, ids=str)
def test_callbacks_are_the_same_run(where):
    assert_same_run(kinds_of_callbacks, where)


@pytest.mark.parametrize("where", mostly_slow(SEVERAL, "SingleLearnerCoarse-4"), ids=str)
def test_a_planner_in_a_scan_is_the_same_run(where):
    assert_same_run(planner_in_a_scan, where)


def only_a_callback():
    """A loop of two fragments, one of which is only a callback, so that nothing else chooses its sharding."""
    learn = msrl.fragment(role="learner")(lambda x: x * 2)
    return Case(lambda s: ({"x": learn(plan(s["x"]))}, {}), lambda: {"x": jnp.ones(ENVS)}, {"x": P("env")}, 1)


@pytest.mark.parametrize("devices", mostly_slow([2, 3, 4], "3"))
@pytest.mark.parametrize(
    "policy", [policies.MultiLearner(), policies.SingleLearnerCoarse(), slow_unless(False, policies.Environments())], ids=str
)
def test_every_device_holds_what_the_host_returned(policy, devices):
    case = only_a_callback()
    program = msrl.compile(case.iteration, case.init(), policy=policy, axes=case.axes, devices=jax.devices()[:devices])
    after, _ = program.run(case.init(), 1)
    for shard in after["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, 4.0)


def test_explain_warns_of_exceptions_in_callbacks_on_several_devices():
    case = only_a_callback()
    for devices, warned in ((1, False), (2, True)):
        program = msrl.compile(
            case.iteration, case.init(), policy=policies.MultiLearner(), axes=case.axes, devices=jax.devices()[:devices]
        )
        warnings = [w for w in program.explain().warnings if "host callback" in w]
        assert bool(warnings) == warned
        if warned:
            assert "'plan'" in warnings[0] and "ends the process" in warnings[0]
