"""The start of a process: what is imported, how many programs are compiled, and the programs that are kept on disk."""

import json
import os
import shutil
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.cli.listing import names_in_sources
from msrl_jax.fragments.runtime.executables import Executables, Request
from msrl_jax.fragments.support import compiling
from tests.support import processes

RUN = """
import collections, json, sys
import jax
events, programs = collections.Counter(), []
jax.monitoring.register_event_listener(lambda name, **about: events.update([name.rpartition("/")[2]]))
def compiled(name, seconds, fun_name="", **about):
    if name.endswith("backend_compile_duration"):
        programs.append(fun_name)
jax.monitoring.register_event_duration_secs_listener(compiled)
"""
TINY = [
    "train",
    "--total-steps",
    "64",
    "--num-envs",
    "4",
    "--unroll-length",
    "8",
    "--hidden-sizes",
    "8",
    "--eval-episodes",
    "2",
    "--progress",
    "none",
]
TRAIN = f"""
import gymnax  # which compiles a program as it is imported
{RUN}
from msrl_jax.cli import main
code = main({TINY} + ["--out", sys.argv[1]])
folder = jax.config.jax_compilation_cache_dir
print(json.dumps([code, events["cache_hits"], events["cache_misses"], programs, folder]))
"""


def python(code, *arguments, **environment):
    """Runs code in a process of its own, with one device and without the settings of the tests."""
    ours = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "MSRL_JAX_CACHE")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    quick = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    kept |= quick | environment
    done = processes.run([sys.executable, "-W", "always::UserWarning", "-c", code, *arguments], env=kept)
    assert done.returncode == 0, done.stderr
    return done


def train(out, **environment):
    done = python(TRAIN, out, **environment)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_listing_and_help_import_no_jax():
    """Except the help of commands that take an algorithm, whose fields are options."""
    code = """
import contextlib, sys
from msrl_jax.cli import main
from msrl_jax.cli.commands import COMMANDS
import msrl_jax
for words in (["list"], ["list", "--json"], ["--help"], ["--version"]):
    assert main(words) == 0
helped = [name for name, command in COMMANDS.items() if not command.has_fields]
assert {"evaluate", "video", "export", "report", "reproduce", "check-env", "act", "estimate"} < {*helped}
for name in helped:
    with contextlib.suppress(SystemExit):
        main([name, "--help"])
dir(msrl_jax)
print(sorted({"jax", "flax", "optax", "gymnax", "jaxmarl", "numpy"} & set(sys.modules)))
"""
    assert python(code).stdout.splitlines()[-1] == "[]"


def test_names_that_are_listed_without_imports_are_those_of_the_registries():
    found = names_in_sources()
    assert {"KuhnPoker", "PointMaze", "RockPaperScissors"} < set(found["environments"]) <= set(msrl.envs.names())
    assert found["algorithms"] == msrl.algorithms.names() and found["policies"] == msrl.policies.names()


def test_every_name_of_the_package_is_there():
    assert set(msrl.__all__) <= set(dir(msrl)) and "train" in msrl.__all__
    for name in msrl.__all__:
        assert getattr(msrl, name) is not None
    with pytest.raises(AttributeError, match="module 'msrl_jax' has no attribute 'trian'"):
        _ = msrl.trian


@pytest.mark.long
def test_what_this_package_does_not_use_is_not_imported():
    code = """
import sys
from msrl_jax import envs
envs.make("KuhnPoker"), envs.names()
suites = {"brax", "gymnax", "gymnasium", "jaxmarl", "jumanji", "mujoco_playground", "pgx", "xminigrid"}
print(sorted(suites & set(sys.modules)))
names = envs.names()
import gymnax
ours = {"KuhnPoker", "PointMaze", "RockPaperScissors"} | {name for name in names if ":" in name}
assert sorted({*gymnax.registered_envs, *ours}) == sorted(names), "the names that were read are those of gymnax"
from gymnax.environments import Pong
gymnax.register("Mine-v0", Pong)
assert "Mine-v0" in envs.names() and envs.make("Mine-v0").env.__class__ is Pong
"""
    assert python(code).stdout == "[]\n"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder of programs, and what the first run that wrote to it did."""
    folder = tmp_path_factory.mktemp("cache") / "programs"
    return folder, *train(folder.parent / "run", MSRL_JAX_CACHE=str(folder))


@pytest.mark.long
def test_a_default_run_compiles_few_programs(kept):
    _, (_, _, _, programs, _), _ = kept
    # The initial state, the training and the evaluation; then copies of the state, keys, and gymnax's spaces.
    assert sorted(p for p in programs if p in ("jit(iterations)", "jit(play)")) == ["jit(iterations)", "jit(play)"], programs
    assert len(programs) <= 10, programs


@pytest.mark.long
def test_the_second_run_compiles_nothing_again(kept, tmp_path):
    folder, (code, hits, misses, programs, after), said = kept
    assert (code, hits, after) == (0, 0, None) and misses >= 3 and said.count(f"stored in {folder}") == 1
    (code, hits, misses, again, _), said = train(tmp_path / "run", MSRL_JAX_CACHE=str(folder))
    assert code == 0 and misses == 0 and hits == len(again) and "stored in" not in said
    assert sorted(again) == sorted(programs)
    rows = [(path / "run" / "metrics.csv").read_text().splitlines() for path in (folder.parent, tmp_path)]
    named = [dict(zip(text[0].split(","), text[-1].split(","), strict=True)) for text in rows]
    for name in ("step", "policy_loss", "episode_return", "eval_return"):
        assert named[0][name] == named[1][name], name


@pytest.mark.slow
def test_a_damaged_program_is_compiled_again(kept, tmp_path):
    folder, _, _ = kept
    files = sorted(folder.rglob("*-cache"))
    training = next(path for path in files if "iterations" in path.name)
    training.write_bytes(training.read_bytes()[:1000])
    (code, hits, misses, _, _), said = train(tmp_path / "run", MSRL_JAX_CACHE=str(folder))
    assert code == 0 and misses == 1 and hits >= 2 and "rror" not in said
    zlib.decompress(training.read_bytes())


SORT = f"""{RUN}
import os
import jax.numpy as jnp
from msrl_jax.fragments.support import compiling
for choice in sys.argv[1:]:
    os.environ.pop("MSRL_JAX_CACHE", None)
    if choice != "default":
        os.environ["MSRL_JAX_CACHE"] = choice
    for n in (3, 4):
        with compiling.on_disk():
            jax.jit(lambda x: jnp.sort(x) + 7)(jnp.ones(n))
    print(events["cache_misses"], sorted(os.listdir()))
"""


@pytest.mark.long
def test_the_cache_can_be_off_and_a_folder_that_cannot_be_is_no_obstacle(tmp_path):
    (tmp_path / "file").touch()
    bad = "gs://bucket/programs", tmp_path / "file" / "programs"
    choices = ["off", "none", " off ", *bad, *bad, "default"]
    done = python(f"import os; os.chdir({str(tmp_path)!r})\n{SORT}", *choices, HOME=str(tmp_path), XDG_CACHE_HOME="")
    *none, default = done.stdout.splitlines()
    assert none == ["0 ['file']"] * 7 and default.endswith("['.cache', 'file']") and not default.startswith("0 ")
    assert (tmp_path / ".cache" / "msrl-jax").is_dir()
    assert done.stderr.count("compiled programs are not stored on disk") == 2, "each is said once"
    assert done.stderr.count("is not a folder of this machine") == 1


def test_a_full_disk_is_no_obstacle(tmp_path, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.warns(compiling.CacheWarning, match="the disk of .* is full"):
        assert compiling._prepare_folder(str(tmp_path / "programs")) is None


IN_PYTHON = f"""{RUN}
import jax.numpy as jnp
import msrl_jax as msrl
from msrl_jax.fragments.support import compiling
tiny = dict(total_steps=64, num_envs=4, unroll_length=8, hidden_sizes=(8,), eval_episodes=0, progress=False)
seconds = lambda: jax.config.jax_persistent_cache_min_compile_time_secs
before = seconds()
msrl.train(**tiny)
print(events["cache_misses"], jax.config.jax_compilation_cache_dir, seconds() == before)
jax.jit(lambda x: jnp.sort(x) + 7)(jnp.ones(3))
print(events["cache_misses"])
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
with compiling.on_disk():
    jax.jit(lambda x: jnp.sort(x) + 8)(jnp.ones(3))
print(jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.long
def test_train_keeps_programs_but_leaves_jax_s_settings_as_they_were(tmp_path):
    said = python(IN_PYTHON, tmp_path / "own", XDG_CACHE_HOME=str(tmp_path / "cache")).stdout.splitlines()
    misses, folder, same = said[0].split()
    assert int(misses) >= 2 and (folder, same) == ("None", "True")
    assert said[1] == misses, "programs of the user's own are not kept"
    assert said[2] == str(tmp_path / "own") and list((tmp_path / "own").glob("jit__lambda*"))
    (machine,) = (tmp_path / "cache" / "msrl-jax" / "programs").iterdir()
    assert machine.name == compiling.machine() and machine.stat().st_mode & 0o077 == 0


def test_the_oldest_programs_leave_when_there_are_too_many_and_no_other_files(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "MOST_BYTES", 250)
    for age, version in enumerate(("3", "2", "1")):
        path = tmp_path / f"jaxlib-{version}-0123456789ab" / "jit_f-cache"
        path.parent.mkdir()
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    others = ["thesis.tex", "runs/my-cache", "jaxlib-notes/my-cache", "jaxlib-1-0123456789ab/notes"]
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(1000))
        os.utime(tmp_path / name, (1.0, 1.0))
    own = tmp_path / "jaxlib-3-0123456789ab"
    (own / ".checked").touch()  # so the files, which are older, are not read
    compiling._remove_excess_files(tmp_path, own)
    assert sorted(p.parent.name[7] for p in tmp_path.glob("*/jit_f-cache")) == ["2", "3"]
    assert all((tmp_path / name).exists() for name in others)


def test_programs_that_were_cut_off_leave(tmp_path):
    whole = zlib.compress(bytes(range(256)) * 100)
    (folder := tmp_path / "jaxlib-3-0123456789ab").mkdir()
    for name, data in {"whole": whole, "cut": whole[:-10], "empty": b"", "other": b"\x28\xb5\x2f\xfd"}.items():
        (folder / f"{name}-cache").write_bytes(data)
    for _ in range(2):
        compiling._remove_excess_files(tmp_path, folder)
        assert sorted(path.name for path in folder.iterdir()) == [".checked", "other-cache", "whole-cache"]
        (folder / "late-cache").write_bytes(whole[:-10])  # after the first time


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/big/cache"}, "/big/cache/msrl-jax/programs"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/msrl-jax/programs"),
        ("darwin", {"XDG_CACHE_HOME": "/big/cache"}, "/home/me/Library/Caches/msrl-jax/programs"),
    ],
)
def test_the_folder_is_where_the_system_keeps_caches(platform, environment, expected, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert compiling.user_folder() == Path(expected)


def three_numbers():
    return jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def test_another_thread_compiles_the_same_program_once():
    executables, x = Executables(), three_numbers()
    double = lambda x: (2 * x,)
    executables.begin(Request("double", double, [x]))
    executables.begin(Request("double", double, [x]))
    compiled = executables.compile(Request("double", double, [x]))
    assert executables.compile(Request("double", double, [x])) is compiled and executables.count == 1
    np.testing.assert_array_equal(compiled(jnp.arange(3.0))[0], [0, 2, 4])


def test_an_error_of_another_thread_s_compiler_reaches_the_user():
    executables, x = Executables(), three_numbers()
    call = lambda x: (jax.ffi.ffi_call("no_such_target", x)(x),)
    executables.begin(Request("call", call, [x]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_target"):
        executables.compile(Request("call", call, [x]))


@pytest.mark.long
def test_a_thread_that_outlives_the_main_thread_compiles(tmp_path):
    code = """
import threading, time
from msrl_jax.fragments.support.compiling import in_background

def later():
    threading.main_thread().join()
    time.sleep(0.2)
    print(in_background(lambda: 40 + 2)())

threading.Thread(target=later).start()
"""
    assert python(code).stdout.split() == ["42"]


def test_a_command_does_not_wait_for_what_is_being_compiled():
    code = """
import sys, time
from msrl_jax import cli
from msrl_jax.fragments.support import compiling

compiling.in_background(lambda: time.sleep(1000))
sys.argv = ["msrl-jax", "--version"]
sys.exit(cli.main())
"""
    assert python(code).stdout.startswith("msrl-jax ")
