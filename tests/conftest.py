"""Every test runs on eight virtual CPU devices, so that placements and collectives are real."""

import atexit
import gc
import os
import platform
import shutil
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support import processes

# Nearly all the time of the tests is compiling, half of it in LLVM's passes. Without them only some products and sums become
# one operation that rounds once, so equal programs would differ in their last bits: AVX has no such operation. What users run
# is optimised; `XLA_FLAGS="--xla_backend_optimization_level=3 --xla_cpu_max_isa=AVX512" pytest` tests that.
_IS_0_10 = version("jaxlib").startswith("0.10.")
_X86 = platform.machine().lower() in ("x86_64", "amd64")
_QUICK_COMPILER = (
    ["--xla_backend_optimization_level=0", "--xla_cpu_max_isa=AVX"] if _X86 else ["--xla_backend_optimization_level=1"]
)

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        *_QUICK_COMPILER,
        # Eight devices on a busy machine with few cores may meet late; that is no deadlock.
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
        # Another third is in a code generator that only these versions can do without; splitting a program pays for large ones.
        *(("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1") if _IS_0_10 else ()),
        os.environ.get("XLA_FLAGS", ""),  # the last of two equal flags counts
    ]
)

os.environ["COLUMNS"] = "120"  # tables fit the terminal, whatever it is here

# Limits of `-n auto`: a process grows to about 3 GiB, and more than 16 would only wait for the longest test.
BYTES_PER_PROCESS, MOST_PROCESSES = 3 * 2**30, 16

os.environ["MSRL_JAX_CACHE"] = "off"  # the user's programs are none of the tests' business

os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # Python's lines in programs are a tenth of the time

# Programs compiled by one worker serve the others, for as long as this run lasts.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="msrl-jax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"  # smaller ones are compiled as fast as they are stored
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job that a shell has started with `&`; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

MOST_PROGRAMS = 400


def pytest_collection_finish():
    """What is imported by now stays: it is not searched for garbage, and the rest seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def few_programs_are_kept():
    """JAX keeps each program that it has lowered, 1.5 MB at least, and lowers the slower the more of them there are."""
    import jax

    yield
    if len(jax.devices()[0].client.live_executables()) > MOST_PROGRAMS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Ends what a test has started and not ended."""
    yield
    processes.end_all()


@pytest.fixture(autouse=True)
def modules_of_a_test_are_forgotten(tmp_path_factory):
    """A module that a test has imported from its temporary folder would hide one of the same name from the next test."""
    before = set(sys.modules)
    yield
    folder = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]


@pytest.hookimpl(optionalhook=True)  # pytest-xdist asks; `-p no:xdist` leaves it out
def pytest_xdist_auto_num_workers():
    """Returns the number of processes of `-n auto`: one per core that this process may use, as far as memory goes."""
    if chosen := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, _limit_of_container("cpu.max", cores))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = min(memory, _limit_of_container("memory.max", memory))
    return max(1, min(int(cores), int(memory / BYTES_PER_PROCESS), MOST_PROCESSES))


def _limit_of_container(name, otherwise):
    """Returns what cgroups allow this process: cores (`cpu.max`, a quota per period) or bytes (`memory.max`)."""
    try:
        limit, *period = Path("/sys/fs/cgroup", name).read_text().split()
    except OSError:
        return otherwise
    return otherwise if limit == "max" else int(limit) / int(*period or [1])


@pytest.fixture(scope="session")
def tiny():
    """A config that compiles and runs fast: iterations of 64 steps."""
    return {
        "num_envs": 8,
        "unroll_length": 8,
        "num_epochs": 1,
        "num_minibatches": 2,
        "hidden_sizes": (8,),
        "normalize_observations": True,
    }


@pytest.fixture(scope="session")
def one_device():
    import jax

    return jax.devices()[:1]
