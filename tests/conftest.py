"""Every test runs on eight virtual CPU devices, so that placements and collectives are real."""

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        # Nearly all the time of the tests is compiling, a third of it in LLVM's dearer passes.
        "--xla_backend_optimization_level=1",
        # Eight devices on a busy machine with few cores may meet late; that is no deadlock.
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
        # Another third is in a code generator that only these versions can do without.
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
        os.environ.get("XLA_FLAGS", ""),  # the last of two equal flags counts
    ]
)

# Programs compiled by one worker serve the others, for as long as this run lasts.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="msrl-jax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
