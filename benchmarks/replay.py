"""Measures replay buffers: microseconds per insertion, sample and update of priorities, at growing capacities.

    python benchmarks/replay.py

Each operation is timed as a loop within one program, without dispatch, on a full and donated buffer. If flashbax is installed,
its trajectory buffers are measured too, in turn with ours, on the same items and windows. Prints a table, then one line of
JSON.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from msrl_jax import replay

LOOPS = 50


class Functions(NamedTuple):
    """The measured functions of a library's buffer; `update` is None without priorities."""

    init: Callable[[], Any]
    insert: Callable[[Any, Any], Any]
    sample: Callable[[Any, jax.Array], Any]
    update: Callable[[Any, Any, jax.Array], Any] | None


def ours(example: Any, prioritized: bool, capacity: int, args: argparse.Namespace) -> Functions:
    """The buffer of this library."""
    buffer = (replay.prioritized if prioritized else replay.uniform)(
        example,
        capacity=capacity,
        num_envs=args.envs,
        unroll_length=args.unroll,
        batch_size=args.batch,
        length=args.length,
        shards=args.shards,
    )
    return Functions(buffer.init, buffer.insert, buffer.sample, buffer.update if prioritized else None)


def flashbax(example: Any, prioritized: bool, capacity: int, args: argparse.Namespace) -> Functions:
    """The flashbax buffer that draws the same windows."""
    import flashbax as fbx  # pyright: ignore[reportMissingImports]

    sizes = {
        "add_batch_size": args.envs,
        "sample_batch_size": args.batch,
        "sample_sequence_length": args.length,
        "period": 1,
        "min_length_time_axis": args.length,
        "max_length_time_axis": capacity // args.envs // args.unroll * args.unroll,
    }
    if prioritized:
        buffer = fbx.make_prioritised_trajectory_buffer(**sizes, priority_exponent=0.6, device=jax.default_backend())
    else:
        buffer = fbx.make_trajectory_buffer(**sizes)

    def insert(state: Any, items: Any) -> Any:
        return buffer.add(state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), items))

    return Functions(lambda: buffer.init(example), insert, buffer.sample, buffer.set_priorities if prioritized else None)


class Timed:
    """The programs of one buffer, compiled and warm."""

    def __init__(self, functions: Functions, example: Any, capacity: int, args: argparse.Namespace):
        """Compiles the programs, and fills the buffer."""
        keys = jax.random.split(jax.random.key(0), LOOPS)
        items = jax.tree.map(lambda x: jnp.ones((args.unroll, args.envs, *x.shape), x.dtype), example)

        def insert(state, items):
            return lax.scan(lambda state, _: (functions.insert(state, items), None), state, length=LOOPS)[0]

        def sample(state, keys):
            def step(total, key):
                batch = functions.sample(state, key)
                return total + sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(batch.experience)), None

            return lax.scan(step, 0.0, keys)[0]

        def update(state, indices, errors):
            assert functions.update is not None
            change = functions.update
            return lax.scan(lambda state, errors: (change(state, indices, errors), None), state, errors)[0]

        self.state = jax.jit(functions.init)()
        self._insert = jax.jit(insert, donate_argnums=0)
        self._sample = jax.jit(sample)
        self._update = jax.jit(update, donate_argnums=0)
        for _ in range(1 + capacity // (args.envs * args.unroll * LOOPS)):
            self.state = self._insert(self.state, items)
        self._args = {"insert": items, "sample": keys}
        if functions.update:
            indices = jax.jit(functions.sample)(self.state, keys[0]).indices
            self._args["update"] = indices, jax.random.uniform(keys[0], (LOOPS, args.batch))
        for name in self._args:
            self.seconds(name)

    def seconds(self, name: str) -> float | None:
        """The seconds of one call; None if the buffer has no such operation."""
        if name not in self._args:
            return None
        start = time.perf_counter()
        if name == "insert":
            self.state = self._insert(self.state, self._args[name])
        elif name == "update":
            self.state = self._update(self.state, *self._args[name])
        else:
            jax.block_until_ready(self._sample(self.state, self._args[name]))
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / LOOPS


def measure(prioritized: bool, capacity: int, args: argparse.Namespace) -> list[dict]:
    """Measures one capacity in every installed library; takes the smallest of all repeats, which has the least disturbance."""
    example = {"obs": jnp.zeros(args.obs), "action": jnp.int32(0), "reward": jnp.float32(0), "end": jnp.bool_(False)}
    libraries = {"msrl_jax": ours}
    if importlib.util.find_spec("flashbax"):
        libraries["flashbax"] = flashbax
    timed = {
        name: Timed(make(example, prioritized, capacity, args), example, capacity, args) for name, make in libraries.items()
    }
    rows = []
    for operation in ("insert", "sample", "update") if prioritized else ("insert", "sample"):
        found: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(args.repeats):
            for name, programs in timed.items():
                seconds = programs.seconds(operation)
                assert seconds is not None
                found[name].append(seconds)
        least = {name: 1e6 * min(seconds) for name, seconds in found.items()}
        rows.append({"kind": "prioritized" if prioritized else "uniform", "capacity": capacity, "operation": operation} | least)
    return rows


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacities", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--unroll", type=int, default=1, help="steps of each environment in one insertion")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=1, help="steps of a window")
    parser.add_argument("--obs", type=int, default=8, help="numbers in an observation")
    parser.add_argument("--shards", type=int, default=1, help="shards of our buffer")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    rows = []
    for prioritized in (False, True):
        for capacity in args.capacities:
            for row in measure(prioritized, capacity, args):
                times = "".join(f"{name:>12}{row[name]:>9.1f} us" for name in ("msrl_jax", "flashbax") if name in row)
                print(f"{row['kind']:<12}{row['capacity']:>10}  {row['operation']:<8}{times}", flush=True)
                rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
