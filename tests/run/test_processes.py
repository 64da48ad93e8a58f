"""Several processes on one machine: the training run of one process, bit for bit; what happens when one of them ends."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli
from msrl_jax.cli import command_line, launch
from msrl_jax.policies import POLICIES
from msrl_jax.run import Result, processes
from msrl_jax.run.disk import checkpoint
from tests.support import cluster
from tests.support.processes import run as run_process
from tests.support.processes import start as start_process

ROOT = Path(__file__).parents[2]
START = 300
"""Seconds that processes may take to start and to compile, on a busy machine."""


def environment():
    """That of a process which chooses its own number of devices."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    return os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}


def run_cluster(folder, count, devices, cases):
    """Runs cases in `count` processes with `devices` devices each; fails with the output of a process that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    logs = [folder / f"{i}.log" for i in range(count)]
    children = []
    try:
        for i, log in enumerate(logs):
            arguments = [address, count, i, devices, folder, *cases]
            command = [sys.executable, "-m", "tests.support.cluster", *map(str, arguments)]
            with log.open("w") as file:
                children.append(start_process(command, cwd=ROOT, env=environment(), stdout=file, stderr=file))
        deadline = time.monotonic() + START * (1 + len(cases))
        codes = [child.wait(max(1, deadline - time.monotonic())) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert codes == [0] * count, "\n".join(log.read_text()[-3000:] for log in logs)


def assert_equal_runs(folder, count, devices, case, rtol=0.0, atol=0.0):
    """Every process has the bits of a run in this process on as many devices; floats within a tolerance, if one is given."""
    expected = cluster.train(case, jax.devices()[: count * devices])
    for i in range(count):
        with np.load(folder / cluster.file_of(case, i)) as found:
            assert set(found) == set(expected)
            for name, x in expected.items():
                tolerance = (rtol, atol) if np.issubdtype(x.dtype, np.floating) else (0, 0)
                np.testing.assert_allclose(found[name], x, *tolerance, err_msg=f"{case}, process {i}: {name}")


# One program over both processes; the actor on one and the learner on the other.
PAIR = ["ppo/GPUOnly", "ppo+curriculum/SingleLearnerCoarse"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    run_cluster(folder, 2, 1, PAIR)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("case", PAIR)
def test_two_processes_train_as_one(pair, case):
    assert_equal_runs(pair, 2, 1, case)


RUN = [
    "train",
    "--env",
    cluster.ENV,
    "--policy",
    "SingleLearnerCoarse",
    "--num-envs",
    "8",
    "--unroll-length",
    "8",
    "--hidden-sizes",
    "8",
    "--num-minibatches",
    "2",
    "--num-epochs",
    "1",
    "--eval-episodes",
    "0",
    "--chunk",
    "2",
    "--progress",
    "lines",
]


def command(*argv):
    return [sys.executable, "-m", "msrl_jax", *map(str, argv)]


def children_of(launcher):
    """The processes of a launched run, by number."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("PPid"))
            settings = (status.parent / "environ").read_bytes().split(b"\0")
        except (OSError, StopIteration):
            continue  # it has ended
        number = next((s.partition(b"=")[2] for s in settings if s.startswith(launch.INDEX.encode() + b"=")), None)
        if int(parent) == launcher and number is not None:
            found[int(number)] = int(status.parent.name)
    return found


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture
def launched(tmp_path):
    """Starts a run of two processes in a folder; ends it with the test."""
    made = []

    def launch(folder, *argv):
        log, run = tmp_path / f"{len(made)}.log", command(*RUN, "--processes", 2, "--out", folder, *argv)
        with log.open("w") as file:
            made.append(start_process(run, cwd=ROOT, env=environment(), stdout=file, stderr=file))
        return made[-1], log.read_text

    yield launch
    for launcher in made:
        for pid in children_of(launcher.pid).values():
            os.kill(pid, signal.SIGKILL)
        launcher.kill()
        launcher.wait()


def is_gone(pids):
    return not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)


def run_until_saved(launched, folder, *argv):
    """A run that has written a checkpoint, its output, and its processes."""
    before = {c.iteration for c in checkpoint.complete_checkpoints(folder)}
    launcher, output = launched(folder, *argv)
    new = lambda: {c.iteration for c in checkpoint.complete_checkpoints(folder)} - before
    wait_for(lambda: new() or launcher.poll() is not None, START, "the run writes no checkpoint")
    assert launcher.poll() is None, output()
    return launcher, output, children_of(launcher.pid)


@pytest.mark.long
def test_a_killed_process_ends_all_and_a_relaunch_goes_on(launched, tmp_path):
    folder, steps = tmp_path / "run", 64
    launcher, output, pids = run_until_saved(launched, folder, "--total-steps", 10**9, "--checkpoint-every", 4 * steps)
    assert set(pids) == {0, 1}
    os.kill(pids[1], signal.SIGKILL)
    start = time.monotonic()
    assert launcher.wait(processes.HEARTBEAT + launch.PATIENCE) == launch.LOST, output()
    assert time.monotonic() - start < processes.HEARTBEAT + launch.PATIENCE
    *_, last = output().splitlines()
    assert last.startswith("msrl-jax: error: process 1 of 2 was ended by SIGKILL") and "--resume" in last
    assert "Traceback" not in output()
    assert is_gone(pids.values())

    done = checkpoint.newest(folder, print).iteration
    total = (done + 4) * steps
    again = command("train", "--resume", "--processes", 2, "--out", folder, "--total-steps", total, "--json")
    outcome = run_process(again, START, cwd=ROOT, env=environment())
    assert outcome.returncode == 0, outcome.stderr
    summary = json.loads(outcome.stdout.splitlines()[-1])
    assert summary["total_steps"] == total and summary["devices"] == 2

    mine = Result.load(folder)
    theirs = msrl.train(
        "ppo",
        cluster.ENV,
        policy="SingleLearnerCoarse",
        total_steps=total,
        num_envs=8,
        unroll_length=8,
        hidden_sizes=(8,),
        num_minibatches=2,
        num_epochs=1,
        eval_episodes=0,
        chunk=2,
        progress=False,
        devices=jax.devices()[:2],
    )
    for (path, x), y in zip(jax.tree.leaves_with_path(mine.state), jax.tree.leaves(theirs.state), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))
    for name in theirs.history.keys() - {"seconds", "steps_per_second"}:
        np.testing.assert_array_equal(mine.history[name], theirs.history[name], err_msg=name)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_chunk(launched, tmp_path):
    folder = tmp_path / "run"
    launcher, output, pids = run_until_saved(launched, folder, "--total-steps", 10**9, "--checkpoint-every", "2s")
    os.kill(pids[1], signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM, output()
    result = Result.load(folder)
    assert result.status == "interrupted" and checkpoint.newest(folder, print).iteration == result.history["iteration"][-1]


@pytest.mark.slow
def test_processes_end_with_their_launcher(launched, tmp_path):
    launcher, _, pids = run_until_saved(launched, tmp_path / "run", "--total-steps", 10**9, "--checkpoint-every", "2s")
    launcher.kill()
    wait_for(lambda: is_gone(pids.values()), 10, "processes outlive their launcher")


@pytest.mark.slow
def test_a_process_that_hangs_ends_all(launched, tmp_path):
    launcher, output, pids = run_until_saved(launched, tmp_path / "run", "--total-steps", 10**9, "--checkpoint-every", "2s")
    os.kill(pids[1], signal.SIGSTOP)
    assert launcher.wait(2 * processes.HEARTBEAT + launch.PATIENCE) == launch.LOST, output()
    assert "process 0 of 2 lost contact with another process" in output().splitlines()[-1]
    assert is_gone(pids.values())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--processes", "0"], "--processes 0: use at least 1"),
        (["--processes", "2", "--distributed"], "give one"),
        (["--processes", "2", "--resume"], "--resume needs --out"),
    ],
)
def test_bad_options_start_nothing(argv, message, capsys):
    assert cli.main(["train", *argv]) == command_line.BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_launched_run_listens_for_this_machine_alone(monkeypatch):
    given = {}
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    processes.start("127.0.0.1:7", 2, 0)
    assert given["coordinator_bind_address"] == "127.0.0.1:7"  # by default JAX listens at all addresses


def test_an_error_of_a_collective_is_put_in_words(monkeypatch):
    """Only where there are other processes, and only errors that come from collectives."""
    gloo = ValueError("UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:52894")

    def raised(error):
        with pytest.raises(Exception) as found, processes.in_words():
            raise error
        return found.value

    assert raised(gloo) is gloo
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    message = str(raised(gloo))
    assert "another process of this run ended" in message and "--resume" in message and "Gloo AllGather" in message
    mine = ValueError("num_envs=3 cannot be split")
    assert raised(mine) is mine


# 4 processes of one device each, and 2 of two.
CASES = [f"ppo/{name}" for name in sorted(POLICIES)] + [
    *(f"dqn/{name}" for name in ("GPUOnly", "MultiLearner", "SingleLearnerCoarse", "Environments", "Central")),
    "dqn/SingleLearnerCoarse:buffers=1",
    "impala/SingleLearnerCoarse:staleness=2",
    "impala/SingleLearnerCoarse:learners=2,staleness=1",
    "ppo/Central:shards=2",
    "ppo/SingleLearnerFine:learners=2",
]


@pytest.fixture(scope="module", params=[(4, 1), (2, 2)], ids=["4 x 1", "2 x 2"])
def larger(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("larger")
    run_cluster(folder, *request.param, CASES)
    return folder, *request.param


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_policy_on_more_processes(larger, case):
    """To the bit, but where gradients of four devices are summed: Gloo adds them in another order than a single process."""
    sums_of_four = case.endswith(("GPUOnly", "MultiLearner"))
    assert_equal_runs(*larger, case, **({"rtol": 1e-5, "atol": 1e-6} if sums_of_four else {}))
