"""A profile says whose the time is: every fragment that runs, simulators of a known speed, nothing twice."""

import gzip
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.cli import main
from msrl_jax.fragments import host_fragment
from msrl_jax.report.profile_results import OF_RUN, PHASES, Profile

pytestmark = pytest.mark.long

TINY = {"num_envs": 8, "unroll_length": 8, "num_epochs": 1, "num_minibatches": 2, "hidden_sizes": (8,)}
ONCE = {"iterations": 2, "repeats": 1}


@pytest.fixture(scope="module", params=["GPUOnly:num_devices=1", pytest.param("SingleLearnerFine", marks=pytest.mark.slow)])
def ppo(request):
    devices = jax.devices()[:2]
    return msrl.profile("ppo", "CartPole-v1", policy=request.param, devices=devices, **TINY, **ONCE)


def test_every_fragment_has_its_operations(ppo):
    operations = {part.fragment: part.operations for part in ppo.parts}
    assert {"act", "env_step", "gradients", "apply_update", "estimate_advantages"} <= set(operations)
    # Each of the eight steps of an unroll has as many operations, as has each of the two updates of an iteration.
    assert operations["act"] >= 8 and operations["env_step"] >= 8 and operations["apply_update"] >= 2
    # What XLA adds at the beginning and the end of programs, such as copies, has no name.
    unknown = sum(part.operations for part in ppo.parts if part.phase == "not attributed")
    assert unknown < 0.05 * sum(operations.values())


def test_phases_are_those_of_the_roles(ppo):
    phases = {part.fragment: part.phase for part in ppo.parts if part.fragment}
    wanted = {"act": "inference", "env_step": "simulation", "gradients": "learning", "apply_update": "learning"}
    assert wanted.items() <= phases.items() and set(ppo.phases) <= set(PHASES)
    assert sum(ppo.shares.values()) == pytest.approx(1) and min(ppo.shares.values()) >= 0
    assert sum(ppo.phases.values()) == pytest.approx(sum(part.seconds for part in ppo.parts))


def test_it_is_written_and_read(ppo, tmp_path):
    again = Profile.from_dict(json.loads(ppo.save(tmp_path / "p.json").read_text()))
    assert again == ppo
    figure = ppo.save(tmp_path / "p.svg").read_text()
    assert all(phase in figure for phase in ppo.phases)
    events = json.loads(gzip.decompress(ppo.save(tmp_path / "p.trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(ppo.events) > 100
    assert any(event["name"].startswith("env_step: ") for event in events)
    with pytest.raises(ValueError, match="has no trace"):
        again.save(tmp_path / "q.trace.json.gz")
    assert "env_step" in str(ppo) and "<svg" in ppo._repr_html_()


def slowly(x):
    """A simulator whose step takes 20 ms."""
    slowly.calls += 1
    time.sleep(0.02)
    return x + np.float32(1)


def test_a_simulator_has_the_time_that_it_takes():
    step = host_fragment(slowly, jax.ShapeDtypeStruct((4,), jnp.float32))

    @msrl.fragment(role="learner")
    def learn(x):
        return x * 0.5

    def iteration(x):
        x, _ = jax.lax.scan(lambda x, _: (step(x), None), x, None, 3)
        return learn(x), {"x": x.mean()}

    slowly.calls = 0
    program = msrl.compile(iteration, jnp.zeros(4), policy=msrl.policies.MultiLearner(num_devices=1), axes=P())
    found = msrl.profile_program(program, jnp.zeros(4), **ONCE)
    part = next(part for part in found.parts if part.phase == "simulation")
    # Sleeping takes at least as long as was asked, and all else in the iteration is less than what is left.
    assert part.fragment == "slowly" and part.seconds >= 3 * 0.02 * 0.99
    assert found.shares["simulation"] > 0.5
    assert slowly.calls == 3 * (3 + 1 + 2 * 2 * 2)  # three to begin with, one traced, two pairs of two


def test_a_loop_that_is_compiled_as_a_whole_is_of_its_fragment():
    learn = msrl.fragment(role="learner", name="learn")(lambda x: jax.lax.fori_loop(0, 20_000, lambda i, c: jnp.cos(c + i), x))
    program = msrl.compile(lambda x: (learn(x), {}), jnp.ones(4), policy=msrl.policies.GPUOnly(num_devices=1), axes=P())
    found = msrl.profile_program(program, jnp.ones(4), **ONCE)
    assert found.shares["learning"] > 0.5 and {part.fragment for part in found.parts if part.phase == "learning"} == {"learn"}


def test_a_program_is_profiled_from_a_state_that_stays():
    @msrl.fragment(role="actor")
    def act(x):
        return jnp.tanh(x @ x)

    state = jnp.eye(32)
    program = msrl.compile(lambda x: (act(x), {"x": x.sum()}), state, policy=msrl.policies.GPUOnly(num_devices=1), axes=P())
    found = msrl.profile_program(program, state, title="squares", **ONCE)
    assert found.title == "squares" and "inference" in found.phases
    np.testing.assert_array_equal(state, np.eye(32))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"iterations": 0}, "iterations=0"),
        ({"iterations": 65}, "at most 64"),
        ({"repeats": 0}, "repeats=0"),
        ({"repeats": 1.5}, "repeats=1.5"),
        ({"num_envs": -1}, "num_envs"),
        ({"policy": "GPUOny"}, "GPUOny"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        msrl.profile("ppo", **arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "run"
    msrl.train(
        "ppo", "CartPole-v1", policy="GPUOnly:num_devices=1", total_steps=128, eval_episodes=0, out=path, progress=False, **TINY
    )
    return path


def test_a_run_is_profiled_as_it_ran_and_its_page_shows_it(folder, tmp_path, capsys):
    few = ["--iterations", "1", "--repeats", "1"]
    assert main(["profile", "--run", str(folder), *few, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["policy"] == "GPUOnly:num_devices=1 on 1 cpu device" and shown["title"].startswith("ppo on CartPole-v1, 64 ")
    assert json.loads((folder / OF_RUN).read_text())["parts"] == shown["parts"]
    page = msrl.runs_page(folder, tmp_path / "page.html").read_text()
    assert "Where the time of an iteration goes" in page and "estimate_advantages" in page
    for damaged in ("{", "[]", json.dumps(shown | {"error": float("nan")}), json.dumps(shown | {"seconds": "x"})):
        (folder / OF_RUN).write_text(damaged)
        with pytest.raises(ValueError, match=r"profile\.json is damaged .* make it again"):
            msrl.runs_page(folder, tmp_path / "page.html")
    (folder / OF_RUN).unlink()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "{run}", "--env", "Acrobot-v1"], "leave out env"),
        (["--run", "{run}", "--num-envs", "8"], "leave out num_envs"),
        (["--run", "{run}/nothing"], "nothing"),
        (["--out", "{run}/x.png"], "must end in .svg or .json"),
        (["--out", "{run}/none/x.svg"], "does not exist; create it first"),
        (["--iterations", "0"], "iterations=0"),
    ],
)
def test_the_command_line_refuses_in_a_sentence(folder, arguments, words, capsys):
    assert main(["profile", *(word.format(run=folder) for word in arguments)]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert words in errors[-1] and len(errors) == 1


def test_a_run_on_more_devices_is_refused(folder):
    result = msrl.Result.load(folder)
    result.description["devices"]["count"] = 64
    with pytest.raises(ValueError, match="the run had 64 devices, but here are 8; use --cpu-devices 64"):
        msrl.profile(result)
    with pytest.raises(ValueError, match="leave out the policy"):
        msrl.profile(result, policy="GPUOnly")
