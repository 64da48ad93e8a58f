"""The first nan or infinity of a run is located, and its step is reproduced."""

import dataclasses
import json
import tempfile
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli
from msrl_jax.nonfinite import Failure
from msrl_jax.nonfinite.origin import find_origin
from msrl_jax.nonfinite.search import explain_finding
from msrl_jax.run import DivergedError
from msrl_jax.run.loop.guard import Finding
from tests.support.guarded_envs import Faulty
from tests.support.guarded_runs import APART, TOGETHER, WHERE, run

MORE = [
    ("ppo", "observation", APART),
    ("dqn", "reward", TOGETHER),
    ("sac", "reward", APART),
    ("sac", "observation", TOGETHER),
    ("es", "reward", TOGETHER),
    ("dqn", "observation", APART),
]


@pytest.mark.parametrize(
    ("algo", "what", "policy"),
    [
        pytest.param("ppo", "reward", TOGETHER, marks=pytest.mark.long),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
    ],
)
def test_an_environment_that_returns_nan_is_named_and_the_step_is_reproduced(algo, what, policy, tmp_path):
    env, (iteration, step) = Faulty(what), WHERE[algo]
    where = rf"in iteration {iteration}, step {step[0] + 1} of {step[1]}"
    with pytest.raises(DivergedError, match=rf"environment \d returned an? {what} of nan: .* {where}") as caught:
        run(algo, env, policy, out=tmp_path / "run")
    error, origin = caught.value, caught.value.finding.failure.origin
    if (algo, what) == ("ppo", "reward"):
        assert error.member is None and np.isnan(error.result.history[error.metric]).any()
    assert error.result.status == "diverged" and len(error.result.history["step"]) == (iteration + 1) // 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "diverged"
    assert (error.iteration, error.fragment, origin.role, origin.steps) == (iteration, "env_step", "env", (step,))
    assert origin.primitive == ("sqrt" if what == "reward" else "log")
    assert "guarded_envs.py" in origin.source and origin.eager
    again = msrl.nonfinite.replay_step(error.replay, env=env)
    assert again is not None
    assert dataclasses.replace(again.origin, operands=()) == dataclasses.replace(origin, operands=())
    for x, y in zip(again.origin.operands, origin.operands, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
    with pytest.raises(ValueError, match="pass it again"):
        msrl.nonfinite.replay_step(error.replay)
    assert msrl.nonfinite.replay_step(error.replay, env=Faulty()) is None  # a repaired environment


@pytest.mark.slow
@pytest.mark.parametrize("policy", [TOGETHER, "Central:workers=1"])
def test_a_gradient_that_overflows_is_located_in_its_fragment(policy):
    with pytest.raises(DivergedError) as caught:
        run("ppo", Faulty(), policy, learning_rate=1e25, max_grad_norm=1e30)
    error = caught.value
    assert error.iteration == 1 and error.fragment == "gradients"
    assert error.finding.failure.origin.source and "policy_gradient.py" in error.finding.failure.origin.source
    assert msrl.nonfinite.replay_step(error.replay, env=Faulty()).origin.fragment == "gradients"


@pytest.mark.long
def test_the_command_line_reproduces_a_step_and_bench_reports_a_divergence(tmp_path, capsys):
    flags = ["--num-envs", "4", "--unroll-length", "8", "--hidden-sizes", "8", "--num-epochs", "1", "--num-minibatches", "2"]
    flags += ["--learning-rate", "1e25", "--max-grad-norm", "1e30"]
    out = tmp_path / "run"
    assert cli.main(["train", "--total-steps", "64", "--out", str(out), "--progress", "none", *flags]) == 1
    assert "fragment 'gradients'" in (said := capsys.readouterr().err) and f"msrl-jax replay {out}" in said
    assert cli.main(["replay", str(out / "non_finite.npz")]) == 0
    assert "fragment 'gradients' (role 'learner')" in capsys.readouterr().out
    assert cli.main(["bench", "--seconds", "0.01", *flags]) == 1
    assert "is not finite in iteration" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"nonsense"])
def test_a_damaged_file_is_refused(content, tmp_path):
    path = tmp_path / "non_finite.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"non_finite\.npz"):
        msrl.nonfinite.replay_step(path)


def test_infinities_without_effect_are_left_aside():
    def masked(x):
        logits = jnp.where(x > 0, x, -jnp.inf)  # as of forbidden actions
        return jax.nn.softmax(logits).sum() + jnp.log(x[0] - x[0])

    closed = jax.make_jaxpr(masked)(jnp.arange(3.0))
    env = {v: jnp.arange(3.0) for v in closed.jaxpr.invars}
    origin = find_origin(closed.jaxpr.eqns, env, closed.jaxpr.outvars)
    assert origin.primitive == "log" and origin.value == "-inf"


TABLE = np.array([1.0, np.nan], np.float32)
CONSTANTS = {  # functions of a finite x, the operation that makes nan of it, and the constant with which it does
    "where": (lambda x: jnp.where(x > 0.9, jnp.nan, 0.0), "select_n", "nan"),
    "product": (lambda x: jnp.float32(x > 0.9) * jnp.inf, "mul", "inf"),
    "table": (lambda x: jnp.asarray(TABLE)[jnp.int32(x > 0.9)], "dynamic_slice", "float32[2] with nan"),
    "branch": (lambda x: jax.lax.cond(x > 0.9, lambda: jnp.nan, lambda: 0.0), "cond", "nan"),
    "start of a loop": (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y + x, jnp.nan), "add", "nan"),
    "no constant": (lambda x: jnp.log(-x), "log", None),
    "another loop": (lambda x: jax.lax.while_loop(lambda y: y < 2, lambda y: jnp.log(-y), x), "while", None),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_is_not_finite_is_named(name):
    function, primitive, constant = CONSTANTS[name]
    closed = jax.make_jaxpr(lambda x: jax.jit(function)(x))(1.0)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env = {v: jnp.float32(1.0) for v in closed.jaxpr.invars}
    origin = find_origin(closed.jaxpr.eqns, env, closed.jaxpr.outvars, constants)
    assert (origin.primitive, origin.constant, origin.eager) == (primitive, constant, True)
    assert origin.source.startswith(__file__)
    said = str(Failure.from_origin(origin, 1, False))
    assert (f"from finite operands and the constant {constant}. The" in said) == (constant is not None)
    assert "one by one" not in said


def test_the_finding_stays_where_no_temporary_file_can_be_written(monkeypatch):
    """A run without a folder writes its first bad step to a temporary one."""
    found = SimpleNamespace(iteration=3, member=None, origin=SimpleNamespace(fragment="learn"))
    monkeypatch.setattr("msrl_jax.nonfinite.search._find_failure", lambda run, guard: found)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    told = explain_finding(SimpleNamespace(path=None), Finding("loss", None, 4, None), None)
    assert (told.iteration, told.failure, told.replay) == (3, found, None)
    assert told.note.startswith("The step could not be written: ") and "/nowhere" in told.note
