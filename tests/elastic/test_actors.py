"""Elastic actors: processes that join and leave a learner, which may itself be killed; what is lost, and what not."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.cli.command_line import main
from msrl_jax.elastic import actor_pool, replay_arrivals, tls, unroll_log, wire
from msrl_jax.elastic.split_program import split_program
from msrl_jax.elastic.unroll_log import FILE, UnrollLog, read_log
from msrl_jax.run.disk.folder import versions
from tests.support import processes
from tests.support.runs import assert_same_state, plain
from tests.support.slow import slow_unless

ROOT = Path(__file__).parents[2]
START = 120
"""Seconds that processes may take to start and to compile, on a busy machine."""
TINY = {"num_envs": 4, "unroll_length": 16, "hidden_sizes": (8,)}
STEPS = TINY["num_envs"] * TINY["unroll_length"]


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def address():
    return free_address()


def environment():
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    return os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}


def start(log, *argv, limit=None):
    """Starts a process, which may open at most `limit` files."""
    with Path(log).open("a") as file:
        command = [sys.executable, "-m", "msrl_jax", *map(str, argv)]
        command = ["prlimit", f"--nofile={limit}", *command] if limit else command
        return processes.start(command, stdout=subprocess.DEVNULL, stderr=file, env=environment())


def wait_for(condition, what, seconds=START):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.1)
    return found


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(10)


class Live:
    """A run with a learner and actors in processes of their own."""

    def __init__(self, folder, address):
        self.folder, self.run, self.address, self.actors, self.before = folder, folder / "run", address, [], []

    def learn(self, *options, limit=None):
        log = self.folder / "learner.log"
        given = ["--algo", "impala", "--num-envs", 4, "--unroll-length", 16, "--hidden-sizes", 8, "--seed", 3]
        common = ["--out", self.run, "--resume", "--eval-episodes", 0, "--checkpoint-every", "1s", "--progress", "none"]
        return start(log, "train", "--actors-at", self.address, *given, *common, *options, limit=limit)

    def act(self, count=1):
        for _ in range(count):
            self.actors.append(start(self.folder / f"actor{len(self.actors)}.log", "act", self.address, "--wait", "300s"))

    def rows(self):
        file = self.run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] * file.exists()

    def logs(self):
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))

    def wait_for_rows(self, actors, count=2):
        """Waits for `count` more rows in which as many actors are there."""
        seen = len(self.rows()) if (self.run / "metrics.jsonl").exists() else 0
        file = self.run / "metrics.jsonl"
        has = lambda: file.exists() and sum(row["actors"] == actors for row in self.rows()[seen:]) >= count
        wait_for(has, self.logs)

    def lines(self):
        return read_log(self.run / FILE)


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """A run with 2, 4 and 1 actors, whose learner is killed and goes on; at the end it is told to stop."""
    live = Live(tmp_path_factory.mktemp("lived"), free_address())
    length = ["--total-steps", 10**9, "--policy", "SingleLearnerCoarse:staleness=2,parameter_codec=delta(4, 10)"]
    learner = live.learn(*length)
    live.act(2)
    live.wait_for_rows(2)
    live.act(2)
    live.wait_for_rows(4)
    wait_for(lambda: {line.get("ticket", 0) for line in live.lines()} == {0, 1, 2, 3}, live.logs)  # each has sent something
    for actor in live.actors[1:]:
        kill(actor)
    live.wait_for_rows(1)
    checkpoints = live.run / "checkpoints"
    wait_for(lambda: any(checkpoints.glob("*/run.json")), live.logs)
    live.before = live.rows()
    kill(learner)
    time.sleep(1.0)  # the actor that is left waits
    learner = live.learn(*length)
    live.wait_for_rows(1)
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(START) == 143, live.logs()
    assert live.actors[0].poll() is None  # the run may go on
    processes.end_all()
    return live


@pytest.mark.long
def test_actors_join_and_leave_without_a_restart(lived):
    counts = [row["actors"] for row in lived.before]
    assert re.fullmatch("0*1*2+3*4+[321]*1+", "".join(map(str, counts))), counts
    joined = [line["joins"] for line in lived.lines() if "joins" in line]
    assert joined == [0, 1, 2, 3]  # the one that was left kept its ticket, and nobody else came


@pytest.mark.long
def test_an_actor_that_is_killed_costs_its_unroll_and_nothing_else(lived):
    """What arrived of each actor are the first unrolls that it made, without a gap, and a learner takes each once."""
    for ticket in range(4):
        found = [line["unroll"] for line in lived.lines() if line.get("ticket") == ticket]
        assert sorted(set(found)) == list(range(len(set(found)))) and found
        assert len(found) - len(set(found)) <= 1  # the one that was on its way when the learner was killed


@pytest.mark.long
def test_data_are_used_up_to_the_bound_of_staleness_and_else_dropped_and_counted(lived):
    lines = lived.lines()
    second = next(i for i, line in enumerate(lines) if line.get("begins"))
    assert all(0 <= line["used"] - line["version"] <= 2 for line in lines if "used" in line)
    late = [line["dropped"] for line in lines[:second] if "dropped" in line]
    assert late and all(re.fullmatch(r"its parameters are \d+ iterations old, and the bound is 2", reason) for reason in late)
    last = lived.before[-1]
    (at,) = [i for i, line in enumerate(lines[:second]) if line.get("used") == last["iteration"] - 1]
    after = next(i for i, line in enumerate(lines) if i > at and "dropped" not in line)
    counts = [sum("dropped" in line for line in lines[:end]) for end in (at, after)]
    assert counts[0] <= last["dropped_unrolls"] <= counts[1]
    assert lived.rows()[-1]["dropped_unrolls"] >= len(late)  # the count goes on
    ages = [row["parameter_age"] for row in lived.rows()]
    assert min(ages) >= 0 and 0 < max(ages) <= 2


@pytest.mark.long
def test_the_learner_goes_on_from_its_checkpoint_while_actors_wait(lived):
    begins = [line["begins"] for line in lived.lines() if "begins" in line]
    assert len(begins) == 2 and begins[0] == 0 < begins[1]
    rows = [row["iteration"] for row in lived.rows()]
    assert rows == sorted(set(rows)) and rows[-1] > begins[1]


@pytest.mark.long
def test_the_record_is_enough_to_compute_the_run_again(lived):
    """All bits of the learner's state, over joins, leaves, drops and a killed learner."""
    live = msrl.Result.load(lived.run)
    assert_same_state(replay_arrivals(lived.run), live.state)
    used = [line["used"] for line in lived.lines() if "used" in line]
    assert used[-1] + 1 == live.history["iteration"][-1]


@pytest.mark.slow
def test_one_actor_without_staleness_trains_as_one_process_does(tmp_path, address):
    live = Live(tmp_path, address)
    live.act()  # before its learner
    learner = live.learn("--total-steps", 12 * STEPS, "--policy", "SingleLearnerCoarse", "--chunk", 4)
    assert learner.wait(START) == 0, live.logs()
    assert live.actors[0].wait(30) == 0, live.logs()  # it is told that the run is over
    result = msrl.Result.load(live.run)
    expected = msrl.train(
        "impala",
        policy="SingleLearnerCoarse",
        total_steps=12 * STEPS,
        chunk=4,
        seed=3,
        eval_episodes=0,
        progress=False,
        devices=jax.devices()[:2],
        **TINY,
    )
    for x, y in zip(jax.tree.leaves(result.state.params), jax.tree.leaves(expected.state.params), strict=True):
        np.testing.assert_allclose(plain(x), plain(y), rtol=1e-5, atol=1e-6)
    for name in ("episode_return", "entropy", "value_loss", "parameter_age"):
        np.testing.assert_allclose(result.history[name], expected.history[name], rtol=1e-4)


def learner_in_a_thread(address, folder=None, algo="impala", **options):
    """A learner whose actors are made by hand; its result, or its error, is in the list."""
    found, given = [], {"total_steps": 2 * STEPS, "eval_episodes": 0, "progress": False, "time_limit": 300} | options

    def learn():
        try:
            found.append(msrl.train(algo, actors_at=address, out=folder, **given, **TINY))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=learn, daemon=True)
    thread.start()
    return thread, found


def reached(address):
    with contextlib.suppress(wire.WireError):
        return wire.connect(wire.address_of(address), tls.contexts()[1])


def let_in(listener):
    """The channel of a learner of our own to the next actor."""
    connection, _ = listener.accept()
    return wire.Channel(tls.contexts()[0].wrap_socket(connection, server_side=True))


def said(address, *messages):
    """What a learner answers to the last of some messages, each of which has an answer; None only waits for one."""

    answers = []

    with contextlib.closing(wait_for(lambda: reached(address), "nobody listens")) as channel:
        for message in messages:
            if message is not None:
                channel.send(message)
            answers.append(channel.receive(2**20)[0])
    return answers[-1]


def enter(address, ready, ticket=None, run=None):
    """The channel of an actor that is let in, the token of its first unroll, and its ticket."""
    channel = wait_for(lambda: reached(address), "nobody listens")
    channel.send({"versions": versions(), "ticket": ticket, "run": run})
    run = channel.receive()[0]["run"]
    channel.send(ready)
    ticket = channel.receive()[0]["ticket"]
    parameters, _ = channel.receive(2**20)
    return channel, {"run": run, "unroll": 0, "life": parameters["life"], "version": parameters["version"]}, ticket


@pytest.mark.long
def test_bad_actors_are_refused_in_one_sentence_and_nothing_is_lost(address, capfd, tmp_path, monkeypatch):
    """Of no version and of another one, with a ticket of another run or that was never given, with other programs, and those
    that send no unroll of the run, or nan; then a good one. No other learner listens there."""
    monkeypatch.setattr(actor_pool, "_LINGER", 0.2)
    thread, found = learner_in_a_thread(address, tmp_path / "run", progress="lines")
    assert said(address, {}) == {"refused": "it does not report its versions; start it with msrl-jax act"}
    with pytest.raises(ValueError, match=f"actors_at='{address}': cannot listen there .*; stop the learner that uses this"):
        msrl.train("impala", actors_at=address, progress=False, **TINY)
    hello = {"versions": versions(), "ticket": None, "run": None}
    old = said(address, hello | {"versions": versions() | {"msrl-jax": "0.1.0"}})
    assert re.fullmatch(r"it has msrl-jax 0.1.0, but the learner has [\w.]+; install the same version", old["refused"])
    stale = {"refused": "its ticket is from another run; restart the actor"}
    assert said(address, hello | {"ticket": 0, "run": "another"}) == stale
    run = said(address, hello)["run"]
    assert said(address, hello | {"ticket": 0, "run": run}) == stale  # nobody has one yet
    other = said(address, hello, {"fingerprint": "another\n\x1b[2J"})
    assert other["refused"].startswith("its programs differ from the learner's; use the same code")
    forged = said(address, hello, {"cannot": "\x1b[2J\nforged" + "!" * 10**6})["refused"]
    assert forged.startswith("it cannot build the experiment:  [2J forged!") and len(forged) == 1000  # a line of a log

    experiment = msrl.Experiment(algorithm=msrl.algorithms.IMPALA(**TINY), total_steps=2 * STEPS)
    halves = split_program(experiment).halves
    ready, kinds = {"fingerprint": halves.fingerprint}, halves.sent_kinds
    faults = {
        "its token is from another run": {"run": "another"},
        "True is not a count": {"unroll": True},
        "'life'": {"life": None},
        "learner 0 sent no parameters of iteration 7": {"version": 7},  # of the future
        "learner 1 sent no parameters of iteration 0": {"life": 1},
        "-1 is not a count": {"version": -1},
    }
    for text, fault in faults.items():
        channel, token, _ = enter(address, ready)
        channel.send({name: x for name, x in (token | fault).items() if x is not None})
        answer = {"refused": f"its message is not an unroll of this run: {text}; restart the actor"}
        assert channel.receive(2**20)[0] == answer
        channel.close()
    for never in (len(faults), False, 0.0, [0]):  # the first is the next one that will be given
        assert said(address, hello | {"ticket": never, "run": run}) == stale

    channel, token, ticket = enter(address, ready)
    bad = [np.full(x.shape, np.nan, x.dtype) if x.dtype == np.float32 else np.zeros(x.shape, x.dtype) for x in kinds]
    for number in range(actor_pool._FLAWED):
        channel.send(token | {"unroll": number}, bad)
        answer, _ = channel.receive(2**20)
        assert number == actor_pool._FLAWED - 1 or (answer["version"] == 0 and "refused" not in answer)
    assert re.fullmatch(r".*obs has non-finite values, as in 10 consecutive unrolls; look for the cause .*", answer["refused"])
    channel.close()

    gone, _, ticket = enter(address, ready)  # it comes back before its old connection has ended
    back, _, same = enter(address, ready, ticket, run)
    gone._connection.settimeout(60)
    with pytest.raises(wire.WireError, match=r"is gone|disconnected|reset|EOF"):
        gone.receive()
    gone.close()
    assert same == ticket
    assert msrl.elastic.act(address) >= 2
    thread.join(300)
    back.close()
    history = found[0].history
    assert found[0].status == "finished" and history["step"][-1] == 2 * STEPS
    assert history["actors"][-1] == 2 and history["refused_unrolls"][-1] == len(faults) + actor_pool._FLAWED
    lines = read_log(tmp_path / "run" / FILE)
    assert [line["used"] for line in lines if "used" in line] == [0, 1]
    assert sum("refused" in line for line in lines) == actor_pool._FLAWED
    assert sum("refuses" in line for line in lines) == len(faults)
    assert_same_state(replay_arrivals(tmp_path / "run"), found[0].state)
    said_of = [line for line in capfd.readouterr().err.splitlines() if "an actor was refused" in line]
    assert len(said_of) == 10 + len(faults) + 1


@pytest.mark.long
def test_a_flood_without_the_key_takes_few_files_and_ends_nothing(address, tmp_path, monkeypatch):
    """Meanwhile an actor with another key is refused, and one with the right key acts to the end."""
    monkeypatch.setattr(actor_pool, "_UNPROVED", 8)
    monkeypatch.setattr(actor_pool, "_PENALTY", 0.1)
    monkeypatch.setattr(wire, "PATIENCE", 0.5)
    thread, found = learner_in_a_thread(address, tmp_path / "run", total_steps=4 * STEPS)
    wait_for(lambda: reached(address), "nobody listens").close()
    files = lambda: len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        before = files()
        flood = [stack.enter_context(socket.create_connection(wire.address_of(address))) for _ in range(100)]
        time.sleep(0.3)
        assert files() - before - len(flood) <= 8 + 4  # with what the run itself may open
        with monkeypatch.context() as patch:
            patch.setenv(tls.KEY_VARIABLE, str(tmp_path / "another key.pem"))
            tls.contexts(lambda line: None)
            with pytest.raises(PermissionError, match=r"has a different key, .*the key .*another key\.pem: copy"):
                msrl.elastic.act(address)
        assert msrl.elastic.act(address, wait=300) >= 4
    thread.join(300)
    assert found[0].status == "finished"


def ended(connection):
    """Whether the other end has ended a connection."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.long
def test_an_actor_reads_the_address_of_its_learner_from_a_file_whenever_the_learner_is_away(tmp_path):
    """The file is not there yet; then it is not whole; then it names one learner, which moves to another address."""
    file, lines, ended = tmp_path / "learner", [], []
    with pytest.raises(ConnectionError, match=rf"no learner answers at {file}: .*No such file"):
        msrl.elastic.act(str(file), wait=0.05)
    file.write_text("127.0.0.1")
    with pytest.raises(ConnectionError, match=f"{file}='127.0.0.1': use HOST:PORT"):
        msrl.elastic.act(str(file), wait=0.05)
    file.unlink()
    act = threading.Thread(target=lambda: ended.append(msrl.elastic.act(str(file), wait=300, say=lines.append)), daemon=True)
    act.start()
    wait_for(lambda: lines == [f"no learner answers at {file} yet; waiting for one"], lambda: str(lines))
    for is_over in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            where = f"127.0.0.1:{listener.getsockname()[1]}"
            file.write_text(f"{where}\n")
            channel = let_in(listener)
        assert channel.receive()[0]["ticket"] is None
        if is_over:
            channel.send({"over": True})
        channel.close()
        assert f"found the learner at {where}; waiting until it is ready" in lines
    act.join(START)
    assert ended == [0]


@pytest.mark.long
def test_several_learners_share_an_actor(address):
    """Each has a run and a policy of its own; the one that ends first does not end the other."""
    runs = {address: ("impala", 2), free_address(): ("ppo", 3)}
    learners = [learner_in_a_thread(at, algo=algo, total_steps=n * STEPS) for at, (algo, n) in runs.items()]
    assert msrl.elastic.act(*runs) >= 5
    for thread, _ in learners:
        thread.join(300)
    results = [found[0] for _, found in learners]
    assert [(result.experiment.name, result.history["step"][-1] // STEPS) for result in results] == list(runs.values())


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"actors_at": "7000"}, "actors_at='7000': use HOST:PORT"),
        ({"actors_at": "127.0.0.1:0"}, "actors_at='127.0.0.1:0': use HOST:PORT"),
        ({"devices": []}, "devices is empty; pass at least one"),
        ({"policy": "auto"}, 'policy="auto" compares policies without actors in other processes; remove one of the two'),
        ({"policy": "GPUOnly"}, "actors_at: GPUOnly.* does not support actors in other processes; use SingleLearner"),
        ({"policy": "SingleLearnerCoarse:trajectory_codec=bfloat16"}, "does not support actors in other processes"),
        ({"record": "data.npz"}, "record='.*data.npz' needs the environments, which run in the actors"),
        ({"guard": "rollback"}, 'guard="rollback" needs the environments'),
        ({"env": "gymnasium:CartPole-v1"}, r"simulated on the host\. Remove actors_at, or use an environment .* in JAX$"),
        ({"seeds": 2}, r"2 members.*\. Remove actors_at, or train one seed with one value of each hyperparameter$"),
        ({"normalize_rewards": True}, r"\. Remove actors_at, or normalize_observations and normalize_rewards$"),
    ],
)
def test_bad_settings_are_refused_before_anything_compiles(given, error):
    with pytest.raises(ValueError, match=error):
        msrl.train("impala", **({"actors_at": "127.0.0.1:7000"} | given), progress=False, **TINY)


@pytest.mark.slow
def test_a_run_that_went_on_without_actors_is_not_replayed(address, tmp_path):
    folder = tmp_path / "run"
    thread, found = learner_in_a_thread(address, folder)
    msrl.elastic.act(address)
    thread.join(300)
    assert_same_state(replay_arrivals(folder), found[0].state)
    whole = (folder / FILE).read_text().splitlines(keepends=True)
    for cut in (whole[:-1], [line for line in whole if '"unroll": 0' not in line]):
        (folder / FILE).write_text("".join(cut))
        with pytest.raises(ValueError, match=r"is incomplete .* is missing"):
            replay_arrivals(folder)
    (folder / FILE).write_text("".join([*whole, '{"gap": 2}\n']))
    with pytest.raises(ValueError, match="has a gap where lines could not be written, so the run cannot be replayed"):
        replay_arrivals(folder)
    (folder / FILE).write_text("".join(whole))
    with pytest.raises(ValueError, match="but the experiment 1; pass the run's own"):
        replay_arrivals(folder, dataclasses.replace(found[0].experiment, seed=1))
    msrl.train(resume=folder, total_steps=3 * STEPS, policy="GPUOnly", progress=False, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="did not learn from actors all the time"):
        replay_arrivals(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:total_steps changes")
def test_a_run_that_was_extended_is_replayed_with_the_schedules_that_it_had(address, tmp_path):
    """The learning rate falls over `total_steps`; the guard, which is part of the programs, changes too."""
    folder = tmp_path / "run"
    for iterations, guard in ((3, "halt"), (6, "skip")):
        options = {"total_steps": iterations * STEPS, "guard": guard, "anneal_learning_rate": True, "resume": iterations > 3}
        thread, found = learner_in_a_thread(address, folder, **options)
        msrl.elastic.act(address, wait=300)
        thread.join(300)
        assert found[0].history["step"][-1] == iterations * STEPS
    assert_same_state(replay_arrivals(folder), found[0].state)


@pytest.mark.long
@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (OSError("no space\nis left"), "OSError: no space is left$"),
        slow_unless(False, KeyboardInterrupt(), r"it was interrupted \(SIGINT\), and has no folder from which it could"),
    ],
)
def test_a_run_that_ends_with_an_error_ends_its_actors(address, raised, error, capsys):
    def fails(tick):
        raise raised

    thread, found = learner_in_a_thread(address, total_steps=50 * STEPS, callbacks=[fails])
    assert main(["act", address, "--wait", "300s"]) == 2
    thread.join(300)
    assert re.search(f"error: the run at {address} ended with an error: {error}", capsys.readouterr().err, re.MULTILINE)
    assert found[0] is raised or found[0].interrupted


@pytest.mark.long
@pytest.mark.parametrize("error", [None, slow_unless(False, OSError("no space is left"))])
def test_an_actor_finds_a_learner_that_is_not_ready_and_waits_for_it(address, error, monkeypatch):
    """For longer than the proof of the key may take."""
    monkeypatch.setattr(wire, "PATIENCE", 1.0)

    class Compiling:
        """A hook that takes its time before the learner lets actors in."""

        begun, ready = threading.Event(), threading.Event()

        def begin(self, run):
            self.begun.set()
            assert self.ready.wait(START)
            if error:
                raise error

    compiling, lines, ends = Compiling(), [], []
    thread, found = learner_in_a_thread(address, callbacks=[compiling])
    assert compiling.begun.wait(START)

    def act():
        try:
            ends.append(msrl.elastic.act(address, say=lines.append))
        except RuntimeError as raised:
            ends.append(str(raised))

    acting = threading.Thread(target=act, daemon=True)
    acting.start()
    wait_for(lambda: lines, "the actor says nothing")
    time.sleep(1.5)
    assert lines == [f"found the learner at {address}; waiting until it is ready"]
    compiling.ready.set()
    for each in (thread, acting):
        each.join(300)
    if error:
        assert found == [error] and ends == [f"the run at {address} ended with an error: OSError: no space is left"]
    else:
        assert lines[1] == f"acting for {address}" and found[0].status == "finished" and ends[0] >= 2


@pytest.mark.parametrize("learners", [1, 2])
def test_ctrl_c_ends_the_threads_of_an_actor(learners, address):
    """A thread that computes while Python ends would abort the process."""
    listener, before = wire.listen(wire.address_of(address)), set(threading.enumerate())

    def interrupt():
        with contextlib.ExitStack() as stack:
            for channel in [stack.enter_context(contextlib.closing(let_in(listener))) for _ in range(learners)]:
                channel.receive()  # the actor waits for an answer now
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            ended.wait(START)

    ended = threading.Event()
    learner = threading.Thread(target=interrupt, daemon=True)
    learner.start()
    with listener, pytest.raises(KeyboardInterrupt):
        msrl.elastic.act(*[address] * learners)
    ended.set()
    learner.join()
    assert not any(thread.is_alive() for thread in set(threading.enumerate()) - before)


@pytest.mark.long
def test_an_actor_that_still_compiles_hears_that_the_run_is_over(address):
    thread, found = learner_in_a_thread(address)
    channel = wait_for(lambda: reached(address), "no learner")
    channel.send({"versions": versions(), "ticket": None, "run": None})
    about, _ = channel.receive()
    assert msrl.elastic.act(address, wait=300)  # another one
    assert channel.receive()[0] == {"over": True}
    channel.close()
    thread.join(300)
    assert found[0].status == "finished"

    other, acted = free_address(), list[int]()
    listener = wire.listen(wire.address_of(other))
    acting = threading.Thread(target=lambda: acted.append(msrl.elastic.act(other, wait=60)), daemon=True)
    acting.start()
    with listener, contextlib.closing(let_in(listener)) as channel:
        channel.receive()
        channel.send(about)
        channel.send({"over": True})
    acting.join(300)
    assert acted == [0]


def test_nan_now_and_then_ends_no_actor_and_nan_of_the_learner_are_no_fault_of_it():
    """Nine unrolls with nan, a good one, and nine again; then parameters that are not finite make another one nan."""
    kinds = [jax.ShapeDtypeStruct((1,), np.float32)]
    rewards = [*[np.nan] * 9, 1.0, *[np.nan] * 9, np.nan]
    newest = actor_pool.Published(0, [np.zeros(1, np.float32)])

    class Peer:
        sent = 0

        async def send(self, header, arrays=()):
            if self.sent == len(rewards) - 1:
                learner._newest = actor_pool.Published(0, [np.float32([np.inf])])

        async def receive(self, payload=0):
            if self.sent == len(rewards):
                raise wire.WireError("it is gone")
            self.sent += 1
            token = {"run": "a", "unroll": self.sent - 1, "life": 0, "version": 0}
            return token, memoryview(np.float32([rewards[self.sent - 1]]).tobytes())

    record = SimpleNamespace(run="a", life=0, has_published=lambda *of: True)
    learner: Any = SimpleNamespace(
        program=SimpleNamespace(halves=SimpleNamespace(sent_kinds=kinds)),
        _log=record,
        _learned={0: "reward"},
        _newest=newest,
        _arrived=queue.SimpleQueue(),
        _say=lambda line: None,
    )
    learner._describe_flaw = functools.partial(actor_pool.ActorPool._describe_flaw, learner)

    async def exchange():
        sender = SimpleNamespace(message=lambda packed: (None, packed))
        actor = actor_pool.ConnectedActor(0, Peer(), sender)  # type: ignore[arg-type]
        for _ in range(len(rewards) + 1):
            actor.answers.put_nowait(newest)
        await actor_pool.ActorPool._exchange(learner, actor)

    with pytest.raises(wire.WireError, match="it is gone"):
        asyncio.run(exchange())
    flaws = [learner._arrived.get_nowait().flaw for _ in rewards]
    assert flaws == [*[(flaw := "reward has non-finite values")] * 9, None, *[flaw] * 9, None]


@pytest.mark.parametrize("theirs", [None, [], "1.0", 0], ids=str)
def test_an_actor_without_a_table_of_versions_is_refused(theirs):
    async def receive():
        return {"versions": theirs}, memoryview(b"")

    with pytest.raises(actor_pool.Refusal, match="it does not report its versions"):
        asyncio.run(actor_pool.ActorPool._check_actor(SimpleNamespace(), SimpleNamespace(receive=receive)))


def test_nobody_there():
    with pytest.raises(ValueError, match="an actor needs the address of its learner; use HOST:PORT"):
        msrl.elastic.act()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"no learner answers at {where}: .*; start one with --actors-at"):
            msrl.elastic.act(where, wait=0.3)


def test_what_a_killed_learner_took_after_its_checkpoint_is_taken_again_or_dropped(tmp_path):
    first = UnrollLog(tmp_path)
    first.begin(0)
    tickets = [first.join(), first.join()]
    outcomes = [
        first.take(0, 0, 0, 0, 0, 1),
        first.take(1, 0, 0, 0, 1, 1),  # used at iterations 0 and 1
        first.take(1, 1, 0, 0, 2, 1),  # two iterations old
        first.take(0, 1, 0, 1, 2, 1),
        first.take(0, 1, 0, 1, 3, 1),  # the same one twice
    ]
    assert outcomes == [None, None, "its parameters are 2 iterations old, and the bound is 1", None, "it arrived twice"]
    first.refuse(1, "it is no unroll")
    first.take(1, 2, 0, 2, 2, 1, "obs has nan")
    second = UnrollLog(tmp_path)  # after a checkpoint of 2 iterations
    assert (second.dropped, second.refused) == (first.dropped, first.refused) == (2, 2)
    second.begin(2)
    assert (second.run, second.life, second.join()) == (first.run, 1, 2) and tickets == [0, 1]
    tried = [(life, version) for life in (-1, 0, 1, 2) for version in (-1, 0, 1, 2, 3, 4)]
    published = [x for x in tried if second.has_published(*x, newest=3)]
    assert published == [*((0, version) for version in range(5)), (1, 2), (1, 3)]  # the first may have had any number
    assert second.take(1, 0, 0, 0, 2, 9) == "it arrived twice"  # before the checkpoint
    assert second.take(0, 1, 0, 1, 2, 9) is None  # it was used after the checkpoint, and that is lost
    assert second.take(1, 2, 0, 3, 3, 9) == "the learner that made its parameters lost them"
    assert second.take(1, 3, 1, 3, 3, 9) is None
    assert len(read_log(tmp_path / FILE)) == 16


def test_a_learner_that_goes_on_keeps_little_of_each_line(tmp_path):
    """Three numbers of each unroll that was learned from, until it begins."""
    lines = [{"run": "r", "begins": 0}, {"joins": 0}]
    lines += [{"ticket": 0, "unroll": i, "life": 0, "version": i, "used": i} for i in range(5_000)]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    tracemalloc.start()
    log = UnrollLog(tmp_path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 40 * len(lines) and peak < 80 * len(lines), "a line is a dict of more than 500 bytes"
    log.begin(4_000)
    assert log.take(0, 3_999, 1, 4_000, 4_000, 9) == "it arrived twice" and log.take(0, 4_000, 1, 4_000, 4_000, 9) is None


def test_a_record_that_was_cut_off_goes_on_in_a_line_of_its_own(tmp_path):
    first = UnrollLog(tmp_path)
    first.begin(0)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"joi')
    UnrollLog(tmp_path).begin(0)
    assert [line["begins"] for line in read_log(tmp_path / FILE)] == [0, 0]
    (tmp_path / FILE).write_text("5\n")
    with pytest.raises(ValueError, match=r"is damaged \(a line is not an entry of a log\)"):
        read_log(tmp_path / FILE)


def test_the_record_goes_on_after_a_failure_that_passes(tmp_path):
    """No file may be opened for a while, and then no more than a part of a line be written; the lines come later."""
    record, file = UnrollLog(tmp_path), tmp_path / FILE
    record.begin(0)
    record.join()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.warns(msrl.run.SaveWarning, match="until they can be written: .*Too many open files"):
            record.take(0, 0, 0, 0, 0, 1)
        record.take(0, 1, 0, 1, 1, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(read_log(file)) == 2
    record._retry_time = 0.0  # a second later
    record.take(0, 2, 0, 2, 2, 1)
    assert [line["used"] for line in read_log(file) if "used" in line] == [0, 1, 2]

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 5, limits[1]))
    try:
        with pytest.warns(msrl.run.SaveWarning, match="until they can be written: .*No space left"):
            record.take(0, 3, 0, 3, 3, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    record.close()
    assert [line["used"] for line in read_log(file) if "used" in line] == [0, 1, 2, 3]


def test_threads_write_the_record_one_after_another(tmp_path, monkeypatch):
    """The learner notes what it takes while the thread that talks to actors lets some in."""
    record, fstat, inside, together = UnrollLog(tmp_path), os.fstat, threading.Lock(), list[int]()

    def slow(file):
        together.append(not inside.acquire(blocking=False))
        time.sleep(0.02)
        if not together[-1]:
            inside.release()
        return fstat(file)

    record.begin(0)
    monkeypatch.setattr(unroll_log.os, "fstat", slow)
    threads = [threading.Thread(target=record.refuse, args=(i, "bad")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(together) and sorted(line["refuses"] for line in read_log(tmp_path / FILE)[1:]) == list(range(8))
    assert record.refused == 8


def test_lines_that_could_not_be_kept_leave_a_gap_in_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(unroll_log, "_MAX_UNWRITTEN", 1)
    record = UnrollLog(tmp_path)
    record.begin(0)
    (tmp_path / FILE).rename(tmp_path / "moved")
    (tmp_path / FILE).mkdir()  # nothing can be written there
    with pytest.warns(msrl.run.SaveWarning, match="arrivals wait in memory until they can be written"):
        record.join()
    record._retry_time = 0.0  # a second later
    with pytest.warns(msrl.run.SaveWarning, match="lines of .* are lost, and the run cannot be replayed"):
        record.join()
    record.join()
    (tmp_path / FILE).rmdir()
    (tmp_path / "moved").rename(tmp_path / FILE)
    record.close()
    assert read_log(tmp_path / FILE)[1:] == [{"gap": 2}, {"joins": 2}]


def test_nothing_of_lost_lines_stays_in_the_record(tmp_path, monkeypatch):
    """One of them and a part of the other could be written; what follows is shorter, and a gap that is the last line counts."""
    monkeypatch.setattr(unroll_log, "_MAX_UNWRITTEN", 1)
    record, file = UnrollLog(tmp_path), tmp_path / FILE
    record.begin(0)
    limits, size = resource.getrlimit(resource.RLIMIT_FSIZE), file.stat().st_size
    try:
        for room in (5, 250):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, limits[1]))
            record._retry_time = 0.0  # a second later
            with pytest.warns(msrl.run.SaveWarning, match="No space left"):
                record.refuse(0, 150 * "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.stat().st_size == size + 250
    record.close()
    assert read_log(file)[1:] == [{"gap": 2}]
    record.join()
    assert read_log(file)[1:] == [{"gap": 2}, {"joins": 0}]


@pytest.mark.slow
def test_files_for_saving_are_left_whoever_connects(tmp_path, address):
    """A learner that may open 160 files, and 300 connections without the key that come again when they are ended."""
    live = Live(tmp_path, address)
    learner = live.learn("--total-steps", 10**9, limit=160)
    live.act()
    live.wait_for_rows(1)
    saved = lambda: max((int(p.parent.name) for p in live.run.glob("checkpoints/*/run.json")), default=0)
    flood, most, first, end = [], 0, saved(), time.monotonic() + 15
    with contextlib.ExitStack() as stack:
        while time.monotonic() < end or saved() == first:
            for connection in flood:
                with contextlib.suppress(OSError):
                    connection.send(b"\x16")
            with contextlib.suppress(OSError):
                while len(flood) < 300:
                    flood.append(stack.enter_context(socket.create_connection(wire.address_of(address), 0.1)))
            most = max(most, len(os.listdir(f"/proc/{learner.pid}/fd")))
            flood = [x for x in flood if not ended(x)]
            assert learner.poll() is None, live.logs()
            assert time.monotonic() < end + START, live.logs()
    assert 64 < most <= 160 - 32 and saved() > first
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(START) == 143, live.logs()
    assert saved() == live.rows()[-1]["iteration"]
    assert not any("gap" in line for line in live.lines()) and "cannot be written" not in live.logs()


@pytest.mark.long
def test_a_run_that_diverges_ends_its_actors_too(address):
    thread, found = learner_in_a_thread(address, learning_rate=1e38, total_steps=50 * STEPS)
    with pytest.raises(RuntimeError, match=f"the run at {address} ended with an error: it had non-finite values"):
        msrl.elastic.act(address, wait=300)
    thread.join(300)
    assert isinstance(found[0], msrl.run.DivergedError)
    assert "Its data came from actors, so the iteration was not repeated" in str(found[0])


@pytest.mark.long
def test_a_refusal_by_one_of_several_learners_is_said_at_once_and_the_others_go_on(address):
    other, said, raised = free_address(), [], []
    listener = wire.listen(wire.address_of(other))

    def act():
        with pytest.raises(ValueError, match="the learner refused this actor: it is too late") as info:
            msrl.elastic.act(other, address, say=said.append)
        raised.append(info.value)

    acting = threading.Thread(target=act, daemon=True)
    acting.start()
    with listener, contextlib.closing(let_in(listener)) as channel:
        channel.receive(2**20)
        channel.send({"refused": "it is too late"})
        text = f"acting for {other} ended with an error: the learner refused this actor: it is too late"
        wait_for(lambda: text in said, lambda: str(said))
    assert acting.is_alive()
    thread, found = learner_in_a_thread(address)
    for each in (thread, acting):
        each.join(300)
    assert found[0].status == "finished" and raised
