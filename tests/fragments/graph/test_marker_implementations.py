"""A fragment evaluates the body for the platform that it is lowered for."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import fragment
from tests.support.compare import POLICIES, assert_close, run_plain

X = jnp.linspace(-1.0, 2.0, 12).reshape(4, 3)


@fragment(
    role="actor", implementations={"cpu": lambda x: jnp.sin(x), "gpu": lambda x: jnp.cos(x), "tpu": lambda x: jnp.tanh(x)}
)
def shown(x):
    """A fragment with four different bodies, so that the result shows which one was chosen."""
    return jnp.exp(x)


def operations(fn, platform, *args):
    """The functions, of the four, that the program for a platform contains."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    names = {"stablehlo.sine": "sin", "stablehlo.cosine": "cos", "stablehlo.tanh": "tanh", "stablehlo.exponential": "exp"}
    return {short for name, short in names.items() if name in text}


@pytest.mark.parametrize(("platform", "body"), [("cpu", "sin"), ("cuda", "cos"), ("rocm", "cos"), ("tpu", "tanh")])
def test_the_program_for_a_platform_holds_its_body_and_no_other(platform, body):
    assert operations(shown, platform, X) == {body}
    assert operations(jax.vmap(shown), platform, X) == {body}
    slope = {"sin": "cos", "cos": "sin", "tanh": "tanh"}[body]
    assert operations(jax.grad(lambda x: shown(x).sum()), platform, X) == {slope}


def test_platforms_without_an_implementation_evaluate_the_function_itself():
    only_gpu = fragment(role="actor", implementations={"gpu": jnp.cos})(jnp.exp)
    assert operations(only_gpu, "cpu", X) == {"exp"} and operations(only_gpu, "rocm", X) == {"cos"}
    one_make = fragment(role="actor", implementations={"gpu": jnp.cos, "cuda": jnp.tanh})(jnp.exp)
    assert [operations(one_make, p, X) for p in ("cpu", "cuda", "rocm")] == [{"exp"}, {"tanh"}, {"cos"}]


def test_values_and_derivatives_are_those_of_the_chosen_body():
    np.testing.assert_allclose(shown(X), np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(shown)(X), np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(shown)(X), np.sin(X), rtol=1e-6)
    for transform in (lambda f: f, jax.jit):
        np.testing.assert_allclose(transform(jax.grad(lambda x: shown(x).sum()))(X), np.cos(X), rtol=1e-6)
        tangent = transform(lambda x: jax.jvp(shown, (x,), (2 * x,))[1])(X)
        np.testing.assert_allclose(tangent, 2 * X * np.cos(X), rtol=1e-6)
        of_rows = transform(jax.vmap(jax.grad(lambda x: shown(x).sum())))(X)
        np.testing.assert_allclose(of_rows, np.cos(X), rtol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(shown(X), np.exp(X), rtol=1e-6)


def test_the_devices_that_hold_the_arguments_decide_and_not_the_default():
    """A program is lowered for the platform of its devices: here CPUs, while the default one is not among the bodies."""
    on_last = jax.device_put(X, jax.devices("cpu")[-1])
    np.testing.assert_allclose(jax.jit(shown)(on_last), np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(shown(on_last), np.sin(X), rtol=1e-6)


def test_pytrees_none_static_arguments_and_captured_arrays():
    scale = jnp.float32(3.0)

    def on_cpu(tree, *, power, mask=None):
        assert isinstance(power, int) and mask is None
        return {"a": scale * tree["a"] ** power, "none": None, "pair": (tree["b"][0], jnp.float32(power))}

    @fragment(static_argnames="power", implementations={"cpu": on_cpu})
    def plain(tree, *, power, mask=None):
        return {"a": tree["a"], "none": mask, "pair": (tree["b"][1], jnp.float32(0))}

    tree = {"a": X, "b": (X + 1, X + 1), "c": None}
    got = jax.jit(lambda tree: plain(tree, power=2, mask=None))(tree)
    assert_close(got, {"a": 3 * X**2, "none": None, "pair": (X + 1, jnp.float32(2))})

    def captures(factor):
        return fragment(role="actor", implementations={"cpu": lambda x: factor * x})(lambda x: -x)(X)

    np.testing.assert_allclose(jax.jit(jax.grad(lambda f: captures(f).sum()))(2.0), X.sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x: {"a": x, "b": x[0]}, r"'step': the 'gpu' implementation returns result\['b'\] as float32\[3\], but"),
        (lambda x: {"a": x, "b": jnp.int32(0)}, r"'gpu' implementation returns result\['b'\] as int32\[\], .* float32\[\]"),
        (lambda x: {"a": x}, r"'gpu' implementation lacks result\['b'\]"),
        (lambda x: {"a": x, "b": x.sum(), "c": x}, r"'gpu' implementation has result\['c'\]"),
        (lambda x: {"a": x, "b": None}, r"'gpu' implementation lacks result\['b'\]"),
        (lambda x: {"a": x, "b": x.sum(), "c": None}, "'gpu' implementation returns the pytree"),
    ],
)
def test_an_implementation_returns_what_the_function_does(body, message):
    step = fragment(name="step", implementations={"gpu": body})(lambda x: {"a": x, "b": x.sum()})
    with pytest.raises(TypeError, match=message):
        step(X)


def test_unknown_platforms_and_non_callables_are_refused_at_once():
    with pytest.raises(ValueError, match=r"fragment 'step' has .* unknown platform 'gpus' \(did you mean 'gpu'\?\)"):
        fragment(name="step", implementations={"gpus": jnp.sin})(jnp.sin)
    with pytest.raises(ValueError, match=r"unknown platform 'METAL'; choose from \['cpu', 'gpu'"):
        fragment(name="step", implementations={"METAL": jnp.sin})(jnp.sin)
    with pytest.raises(TypeError, match="fragment 'step': its implementation for 'tpu' is a int; give a function"):
        fragment(name="step", implementations={"tpu": 1})(jnp.sin)


class State(NamedTuple):
    w: jax.Array
    x: jax.Array


@fragment(role="actor", implementations={"cpu": lambda w, x: jnp.cos(w * x), "gpu": lambda w, x: jnp.sin(jnp.sin(w * x))})
def act(w, x):
    return jnp.tanh(w * x)


@fragment(role="env")
def env_step(x, action):
    return 0.9 * x + 0.1 * action


@fragment(role="learner", implementations={"cpu": lambda w, xs: w - 0.01 * (w * xs).mean()})
def learn(w, xs):
    return w + jnp.exp(xs).mean()


def iteration(state):
    def step(x, _):
        x = env_step(x, act(state.w, x))
        return x, x

    x, xs = jax.lax.scan(step, state.x, None, length=4)
    w = learn(state.w, xs)
    return State(w, x), {"w": w}


def plain_iteration(state):
    x, xs = state.x, []
    for _ in range(4):
        x = 0.9 * x + 0.1 * jnp.cos(state.w * x)
        xs.append(x)
    w = state.w - 0.01 * (state.w * jnp.stack(xs)).mean()
    return State(w, x), {"w": w}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_uses_the_bodies_of_its_devices(name):
    state = State(jnp.float32(0.7), jnp.linspace(-1.0, 1.0, 8))
    program = msrl.compile(iteration, state, policy=msrl.policies.get(name), axes=State(P(), P("env")))
    got, metrics = program.run(state, 3)
    want, want_metrics = run_plain(plain_iteration, state, 3)
    assert_close(State(*jax.device_get(tuple(got))), want)
    np.testing.assert_allclose(metrics["w"], want_metrics["w"], rtol=1e-5)


def test_a_plan_counts_the_operations_of_one_body():
    state = State(jnp.float32(0.7), jnp.linspace(-1.0, 1.0, 8))
    plan = msrl.compile(iteration, state, policy=msrl.policies.GPUOnly(), axes=State(P(), P("env"))).explain()
    flops = next(f.flops for f in plan.fragments if f.name == "act")
    assert flops == 3 * 8, "the dearest body makes three numbers of each of 8"
