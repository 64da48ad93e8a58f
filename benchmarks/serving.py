"""The peer's half of a comparison: a process that trains when it is asked to. It needs JAX, and nothing of msrl_jax.

One line of JSON answers the start, with versions and the time to compile. Then every line of input is a number of seconds to
train, and is answered with environment steps per second. Between two lines the process sleeps.
"""

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

CHUNK_SECONDS = 0.5

# Answers alone go to the output; what libraries print, such as brax, goes to the errors.
_ANSWERS = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

# Times to compile are those without a cache.
jax.config.update("jax_enable_compilation_cache", False)


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python and of installed packages."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def compiled(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], float]:
    """Compiles a function for its arguments, and returns the seconds that this took."""
    if wanted := os.environ.get("COMPILE_FOR"):
        _write_program(function, args, **json.loads(wanted))
    start = time.perf_counter()
    program = jax.jit(function).lower(*args).compile()
    return program, time.perf_counter() - start


def _write_program(function: Callable[..., Any], args: Sequence[Any], topology: dict[str, str], path: str, **_: Any) -> None:
    """Compiles for a GPU that this machine does not have, writes the program's text, and exits: for `kernels.py`."""
    device = topologies.get_topology_desc(**topology).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    Path(path).write_text(lowered.compile().as_text())
    sys.exit()


class Loop:
    """Training in chunks of about half a second.

    Attributes:
      compile_seconds: time to trace and compile the first program.
    """

    def __init__(
        self, make: Callable[[int], tuple[Callable[[], Any], float]], steps: int, *, first: int = 2, empty: bool = False
    ):
        """Compiles, warms up, and finds the number of iterations in a chunk.

        Args:
          make: `iterations -> (chunk, seconds)` compiles a chunk; a call of it trains.
          steps: environment steps of an iteration.
          first: iterations of the first call; later ones are typical of a long run.
          empty: whether each chunk restarts, so that the time of a chunk without iterations is to be subtracted.
        """
        first = json.loads(os.environ.get("COMPILE_FOR", "{}")).get("iterations", first)
        chunk, self.compile_seconds = make(first)
        self._overhead, self._steps = 0.0, first * steps
        if empty:
            start, _ = make(0)
            self._overhead = min(_seconds(start) for _ in range(4))
        self._chunk = chunk
        self._train(1)
        rate = max(self._train(1) for _ in range(4))
        iterations = max(1, round(CHUNK_SECONDS * rate / steps))
        (self._chunk, _), self._steps = make(iterations), iterations * steps
        self._train(1)
        self._rate = self._train(1)

    def _train(self, count: int) -> float:
        seconds = sum(_seconds(self._chunk) for _ in range(count))
        # A first guess of a chunk may be shorter than the noise of its start.
        return count * self._steps / max(seconds - count * self._overhead, 0.1 * seconds)

    def run(self, seconds: float) -> float:
        """Trains whole chunks for about `seconds`, and returns environment steps per second."""
        return self._train(max(1, round(seconds * self._rate / self._steps)))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def serve(loop: Loop, versions: dict[str, str]) -> None:
    """Answers requests until the input ends."""
    device = jax.devices()[0]
    first = {"compile_seconds": loop.compile_seconds, "versions": versions, "device": device.device_kind}
    print(json.dumps(first), file=_ANSWERS)
    for line in sys.stdin:
        print(json.dumps({"steps_per_second": loop.run(float(line))}), file=_ANSWERS)
