"""How cost grows with size: one table of CPU seconds or bytes, each with the exponent of a fit.

    python benchmarks/growth.py                       # all sizes: about an hour on two cores
    python benchmarks/growth.py --only members,leaves --small

A cost that grows as `size ** e` has the exponent `e`: 0 is flat, 1 is linear. The fit is a line through the logarithms. CPU
seconds are those of this process, so other processes on the machine disturb them less than they disturb a clock; each is the
least of three. Prints a table, then one line of JSON.
"""

import argparse
import gc
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import replay
from msrl_jax.elastic.unroll_log import UnrollLog
from msrl_jax.run.disk import folder
from msrl_jax.run.prepare import make_experiment


class Cost(NamedTuple):
    """A cost that is measured at several sizes."""

    unit: str
    sizes: Sequence[int]
    measure: Callable[[int], float]


def cpu_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The least CPU seconds of some calls."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(work())
        found.append(time.process_time() - start)
    return min(found)


def peak_bytes(work: Callable[[], object]) -> float:
    """The most bytes that Python and NumPy hold during a call, beyond those before it."""
    gc.collect()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return float(peak)


def per_step(num_envs: int, seeds: int | None) -> float:
    """CPU microseconds of PPO per environment step, in a compiled program of 8 iterations."""
    fields = {"num_envs": num_envs, "unroll_length": 128 if num_envs < 1024 else 32}
    several = {} if seeds is None else {"seeds": seeds}
    experiment = make_experiment("ppo", "CartPole-v1", total_steps=10**12, **fields, **several)
    program = experiment.compile(msrl.policies.get("GPUOnly"))
    held = [experiment.start(program)]

    def advance() -> object:
        held[0], metrics = program.run(held[0], 8)
        return metrics

    advance()
    steps = 8 * num_envs * fields["unroll_length"] * (seeds or 1)
    return 1e6 * cpu_seconds(advance) / steps


def atari_buffer(capacity: int, storage: str | None) -> replay.ReplayBuffer:
    """A buffer of steps with four stacked frames of 84 x 84 bytes."""
    stack, flag = jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8), jax.ShapeDtypeStruct((), jnp.bool_)
    action, reward = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    item = replay.Transition(stack, action, reward, flag, flag, stack)
    codecs = None if storage is None else {"obs": storage, "next_obs": storage}
    return replay.uniform(item, capacity=capacity, num_envs=8, unroll_length=4, batch_size=32, storage=codecs)


def sampling(capacity: int) -> float:
    """CPU microseconds of a batch of 32 from a full buffer of small steps."""
    flag, number = jnp.bool_(False), jnp.float32(0)
    item = replay.Transition(jnp.zeros(4), jnp.int32(0), number, flag, flag, jnp.zeros(4))
    buffer = replay.prioritized(item, capacity=capacity, num_envs=16, unroll_length=16, batch_size=32, discount=0.99)
    items = jax.tree.map(lambda x: jnp.ones((16, 16, *x.shape), x.dtype), item)
    full = jax.jit(lambda s: jax.lax.fori_loop(0, capacity // 256, lambda _, s: buffer.insert(s, items), s), donate_argnums=0)
    state, keys = full(buffer.init()), jax.random.split(jax.random.key(0), 200)
    draw = jax.jit(lambda state, keys: jax.lax.map(lambda key: buffer.sample(state, key).experience.reward.sum(), keys))
    jax.block_until_ready(draw(state, keys))
    return 1e6 * cpu_seconds(lambda: draw(state, keys)) / 200


def chain(fragments: int) -> Callable[[dict], tuple[dict, dict]]:
    """An iteration of so many fragments, alternately of actors and learners."""
    act = msrl.fragment(role="actor")(lambda params, x: 0.5 * x + params[0].sum())
    learn = msrl.fragment(role="learner")(lambda params, x: [0.9 * p - 0.01 * x.mean() for p in params])

    def iteration(state: dict) -> tuple[dict, dict]:
        params, x = state["params"], state["x"]
        for k in range(fragments):
            params, x = (params, act(params, x)) if k % 2 == 0 else (learn(params, x), x)
        return {"params": params, "x": x}, {"mean": x.mean()}

    return iteration


def compiling(policy: str, fragments: int, leaves: int) -> float:
    """CPU seconds of `msrl.compile`, without what XLA does, for a state with so many learned arrays."""
    state, axes = {"params": [jnp.zeros(4)] * leaves, "x": jnp.zeros(8)}, {"params": P(), "x": P("env")}
    return cpu_seconds(lambda: msrl.compile(chain(fragments), state, policy=msrl.policies.get(policy), axes=axes) and ())


def table_of_metrics(members: int) -> float:
    """Peak bytes of writing the table of metrics of 50 rows at the end of a run."""
    returns = np.arange(members, dtype=np.float32)
    rows: list[Any] = [{"step": k, "iteration": k, "episode_return": returns} for k in range(1, 51)]
    with tempfile.TemporaryDirectory() as name:
        folder.append_rows(Path(name), rows)
        return peak_bytes(lambda: folder.write_table(Path(name)))


def resuming(unrolls: int) -> float:
    """Peak bytes of a learner that resumes after so many unrolls."""
    with tempfile.TemporaryDirectory() as name:
        log = UnrollLog(Path(name))
        log.begin(0)
        ticket = log.join()
        for k in range(unrolls):
            log.take(ticket, k, 0, k, k, 1)
        log.close()
        return peak_bytes(lambda: UnrollLog(Path(name)))


COSTS = {
    "environments": Cost("us per step", (16, 128, 1024, 8192, 65_536), lambda n: per_step(n, None)),
    "members": Cost("us per step", (16, 64, 256, 1024, 4096), lambda n: per_step(4, n)),
    "replay": Cost("us per batch", (10_240, 102_400, 1_024_000, 4_096_000), sampling),
    "frames kept whole": Cost("bytes", (10_240, 102_400), lambda n: atari_buffer(n, None).nbytes),
    "frames kept once": Cost("bytes", (10_240, 102_400, 1_024_000), lambda n: atari_buffer(n, "frame_stack(4)").nbytes),
    "leaves": Cost("s to compile", (64, 256, 1024), lambda n: compiling("GPUOnly", 2, n)),
    "fragments": Cost("s to compile", (16, 64, 256), lambda n: compiling("SingleLearnerCoarse", n, 1)),
    "metrics of members": Cost("peak bytes", (16, 256, 4096), table_of_metrics),
    "unrolls": Cost("peak bytes", (1_000, 10_000, 100_000), resuming),
}


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of a line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def main() -> None:
    """Measures the costs that are named, or all."""
    parser = argparse.ArgumentParser(description="Measures how cost grows with size.")
    parser.add_argument("--only", default=",".join(COSTS), help="names, with commas: " + ", ".join(COSTS))
    parser.add_argument("--small", action="store_true", help="leave out the largest size of each")
    args = parser.parse_args()
    found = {}
    for name in args.only.split(","):
        unit, sizes, measure = COSTS[name]
        sizes = sizes[:-1] if args.small else sizes
        costs = [measure(size) for size in sizes]
        found[name] = {"unit": unit, "sizes": list(sizes), "costs": costs, "exponent": round(exponent(sizes, costs), 2)}
        values = ", ".join(f"{size:,}: {cost:,.4g}" for size, cost in zip(sizes, costs, strict=True))
        print(f"{name:20s} {unit:14s} exponent {found[name]['exponent']:5.2f}   {values}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
