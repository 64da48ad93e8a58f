"""Planning for devices that you do not have: names of topologies for which XLA compiles ahead of time.

Such devices only support plans: no array can be placed on them, and nothing can run there.
"""

import contextlib
import os
import re
from collections.abc import Iterator

import jax
from jax.experimental import topologies

from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.support.checks import suggestion
from msrl_jax.fragments.support.tracebacks import entry

FORMS = "tpu:v5e:8x8 (chips along each axis), gpu:h100:8, gpu:h100:2x8 (hosts x GPUs) or cpu:8"

_TPUS = ("v5e", "v5p", "v6e")  # one device per chip
# Chips of one host along each axis, in the pods of all generations.
_CHIPS_PER_HOST = (2, 2, 1)

# What XLA's compiler needs to know of a GPU, from the vendor's data sheets and the CUDA programming guide: compute capability,
# number of multiprocessors, float32 units, shared memory of each and of a block, L2 cache, clock, bandwidth, memory, name.
_GPUS: dict[str, dict[str, str | int | float]] = {
    "a100": {
        "capability": "major: 8",
        "cores": 108,
        "units": 64,
        "shared": 167_936,
        "shared_of_block": 166_912,
        "l2": 40 * 2**20,
        "ghz": 1.41,
        "bandwidth": 2_039_000_000_000,
        "memory": 80 * 2**30,
        "name": "NVIDIA A100-SXM4-80GB",
    },
    "h100": {
        "capability": "major: 9",
        "cores": 132,
        "units": 128,
        "shared": 233_472,
        "shared_of_block": 232_448,
        "l2": 50 * 2**20,
        "ghz": 1.98,
        "bandwidth": 3_352_000_000_000,
        "memory": 80 * 2**30,
        "name": "NVIDIA H100 80GB HBM3",
    },
}
_GPU_CONFIG = """
gpu_device_info {{
  cuda_compute_capability {{ {capability} }} core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {ghz}
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_of_block} shared_memory_per_block: 49152
  l2_cache_size: {l2} memory_bandwidth: {bandwidth} device_memory_size: {memory}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""


@entry
def plan_devices(spec: str) -> list[Device]:
    """Makes devices to plan for, even if you do not have them: `msrl.compile(..., devices=msrl.plan_devices("tpu:v5e:8x8"))`.

    Programs compile for them, and `Program.explain` describes the result. Placing or running a state raises RuntimeError.

    Args:
      spec: `tpu:GENERATION:AxB` or `AxBxC`, chips along each axis; `gpu:KIND:COUNT` or `gpu:KIND:HOSTSxCOUNT`; `cpu:COUNT`, the
        CPU devices of this process.

    Returns:
      The devices; those of one host are adjacent.

    Raises:
      TypeError: if `spec` is not a string.
      ValueError: if the topology is unknown, or this process has fewer CPU devices.
      ImportError: if the compiler of the platform is not installed.
    """
    if not isinstance(spec, str):
        raise TypeError(f"devices {spec!r}: pass a string; use {FORMS}")
    platform, *parameters = spec.lower().split(":")
    if platform not in ("tpu", "gpu", "cpu"):
        hint = suggestion(platform, ("tpu", "gpu", "cpu"))
        raise ValueError(f"devices {spec!r}: unknown platform {platform!r}{hint}; use {FORMS}")
    if platform == "cpu":
        return _cpus(spec, parameters)
    kinds = _TPUS if platform == "tpu" else tuple(_GPUS)
    if len(parameters) != 2:
        raise ValueError(f"devices {spec!r}: pass a kind and a number of devices; use {FORMS}")
    kind, size = parameters
    if kind not in kinds:
        unknown = f"unknown {platform.upper()} {kind!r}{suggestion(kind, kinds)}"
        raise ValueError(f"devices {spec!r}: {unknown}; use {', '.join(kinds)}")
    sizes = _sizes(spec, size)
    return _tpus(spec, kind, sizes) if platform == "tpu" else _gpus(spec, kind, sizes)


def cpus_of(spec: str) -> int:
    """Returns the number of CPU devices in a spec; 0 for other or invalid specs."""
    match = re.fullmatch(r"cpu:(\d{1,5})", spec.lower())
    return int(match[1]) if match else 0


def _sizes(spec: str, text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}", text):
        raise ValueError(f"devices {spec!r}: {text!r} is not a size; use {FORMS}")
    return [int(n) for n in text.split("x")]


def _cpus(spec: str, parameters: list[str]) -> list[Device]:
    if len(parameters) != 1 or len(sizes := _sizes(spec, parameters[0])) != 1:
        raise ValueError(f"devices {spec!r}: pass a number of devices, such as cpu:8")
    devices = jax.devices("cpu")
    if len(devices) < sizes[0]:
        raise ValueError(
            f"devices {spec!r}: this process has {len(devices)} CPU device{'s' * (len(devices) > 1)}. Call "
            f'jax.config.update("jax_num_cpu_devices", {sizes[0]}) before JAX starts'
        )
    return devices[: sizes[0]]


def _tpus(spec: str, kind: str, sizes: list[int]) -> list[Device]:
    sizes += [1] * (3 - len(sizes))
    host = tuple(min(n, limit) for n, limit in zip(sizes, _CHIPS_PER_HOST, strict=True))
    name = "x".join(map(str, sizes))
    try:
        with _set_environment(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_WORKER_HOSTNAMES="localhost"):
            devices = topologies.get_topology_desc(f"{kind}:{name}", "tpu", chips_per_host_bounds=host).devices
    except (RuntimeError, NotImplementedError) as error:
        if "not installed" in str(error) or "libtpu" in str(error):
            raise ImportError(
                f"devices {spec!r} need the compiler for TPUs, which also runs on machines without TPUs: "
                "pip install 'msrl-jax[tpu]', or the libtpu that this version of JAX requires (pip install 'jax[tpu]')"
            ) from error
        raise ValueError(f"devices {spec!r}: no such topology: {_first_line(error)}") from error
    return list(devices)


def _gpus(spec: str, kind: str, sizes: list[int]) -> list[Device]:
    if len(sizes) > 2:
        raise ValueError(f"devices {spec!r}: GPUs are hosts x GPUs, such as gpu:{kind}:2x8")
    hosts, count = sizes if len(sizes) == 2 else (1, sizes[0])
    try:
        return topologies.get_topology_desc(**gpu_topology(kind, hosts, count)).devices
    except (RuntimeError, NotImplementedError) as error:
        raise ImportError(
            f"devices {spec!r}: this JAX cannot compile for NVIDIA GPUs ahead of time ({_first_line(error)}). Install "
            "jax-cuda12-plugin and jax-cuda12-pjrt of the version of jaxlib, and set JAX_PLATFORMS=cpu; or plan for "
            f"cpu:{hosts * count}, whose programs, transfers and bytes between placements are the same"
        ) from error


def gpu_topology(kind: str, hosts: int = 1, count: int = 1) -> dict[str, str]:
    """Returns the arguments of `jax.experimental.topologies.get_topology_desc` for GPUs: `kind` is "h100" or "a100"."""
    return {"platform": "cuda", "target_config": _GPU_CONFIG.format(**_GPUS[kind]), "topology": f"1x{hosts}x{count}"}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


@contextlib.contextmanager
def _set_environment(**variables: str) -> Iterator[None]:
    """Temporarily sets variables that are not set: otherwise libtpu would query the cloud for them, or complain."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
