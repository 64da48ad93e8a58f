"""Groups of host simulators, stale parameters and worker processes: which of them pays, with simulators that take time?

SRL (arXiv 2306.16688) keeps its processes busy in two ways: a worker simulates some environments while others wait for their
actions, and learners do not wait for the actors. Here an actor-critic on CartPole, every step of which sleeps, runs with and
without each, and with both:

    python benchmarks/groups.py --json benchmarks/results/groups.json --docs benchmarks/README.md

With `g` groups, an unroll acts for one group after another in every step; a group has its share of the environments and of the
workers, and is simulated while the others are acted for. All run alternately.
"""

import argparse
import functools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import machine, our_versions, rewrite, spread
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.report.bench import interleave
from msrl_jax.report.provenance import commit
from msrl_jax.returns import gae

NUM_ENVS, UNROLL, UPDATES, HIDDEN = 8, 8, 8, 256
DELAYS, WORKERS = (0.001, 0.003, 0.01), (2, 4)
VARIANTS = {"1 group": (1, 0), "2 groups": (2, 0), "staleness 1": (1, 1), "both": (2, 1)}
"""The number of groups and the staleness of each variant; the others are compared with the first."""
_CHUNK = 8  # iterations between two readings of the metrics


class Slowed(gymnasium.Wrapper):
    """CartPole, every step of which takes so many seconds longer as the file at `path` says, and no processor then."""

    def __init__(self, path: str):
        super().__init__(gymnasium.make("CartPole-v1"))
        self._delay = np.memmap(path, np.float64, "r", shape=1)

    def step(self, action: Any) -> Any:
        """As of CartPole, later."""
        if self._delay[0]:
            time.sleep(self._delay[0])
        return self.env.step(action)


def made(groups: int, staleness: int, workers: int, path: str) -> tuple[msrl.Program, Any]:
    """An actor-critic whose environments are in groups.

    Args:
      groups: number of groups, which divides the numbers of environments and of workers.
      staleness: how many iterations the actors' parameters lag behind.
      workers: processes that simulate, of all groups together.
      path: the file that says how long a step sleeps.

    Returns:
      The program, for two devices, and its first state.
    """
    env: Any = msrl.envs.GymnasiumEnvironment(functools.partial(Slowed, path), "slowed", num_workers=workers // groups)
    venvs = [msrl.envs.vectorize(env, NUM_ENVS // groups) for _ in range(groups)]
    network = nn.Sequential([nn.Dense(HIDDEN), nn.tanh, nn.Dense(HIDDEN), nn.tanh, nn.Dense(env.action_space.n + 1)])
    optimizer = optax.adam(1e-3)

    @msrl.fragment(role="actor")
    def act(params, obs, key):
        return jax.random.categorical(key, jnp.asarray(network.apply(params, obs))[:, :-1])

    @msrl.fragment(role="learner")
    def learn(params, opt_state, trajectories):
        obs, action, t = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *trajectories)

        def loss(params):
            out: Any = network.apply(params, obs)
            value, next_value = out[..., -1], jnp.asarray(network.apply(params, t.final_obs))[..., -1]
            advantage = gae(t.reward, value, next_value, t.terminated, t.truncated, discount=0.99, gae_lambda=0.95)
            advantage = jax.lax.stop_gradient(advantage)
            log_prob = -optax.softmax_cross_entropy_with_integer_labels(out[..., :-1], action)
            return jnp.mean(0.5 * (value - jax.lax.stop_gradient(value) - advantage) ** 2 - log_prob * advantage)

        def update(carry, _):
            updates, opt_state = optimizer.update(jax.grad(loss)(carry[0]), carry[1])
            return (optax.apply_updates(carry[0], updates), opt_state), None

        return jax.lax.scan(update, (params, opt_state), length=UPDATES)[0]

    def iteration(state):
        params, opt_state, simulated, key = state

        def step(before, keys):
            after, seen = [], []
            for venv, (env_state, obs), key in zip(venvs, before, keys, strict=True):
                action = act(params, obs, key)
                env_state, t = venv.step(env_state, action)
                after.append((env_state, t.obs))
                seen.append((obs, action, t))
            return after, seen

        key, *keys = jax.random.split(key, 1 + UNROLL * groups)
        simulated, trajectories = jax.lax.scan(step, simulated, jnp.stack(keys).reshape(UNROLL, groups))
        params, opt_state = learn(params, opt_state, trajectories)
        return (params, opt_state, simulated, key), {"reward": trajectories[0][2].reward.mean()}

    simulated = [venv.reset(key) for venv, key in zip(venvs, jax.random.split(jax.random.key(0), groups), strict=True)]
    params = network.init(jax.random.key(1), simulated[0][1])
    state = params, optimizer.init(params), simulated, jax.random.key(2)
    axes = P(), P(), [(venv.axes, P("env")) for venv in venvs], P()
    policy = msrl.policies.SingleLearnerCoarse(staleness=staleness)
    return msrl.compile(iteration, state, policy=policy, axes=axes, devices=jax.devices()[:2]), state


class Training:
    """A run that every call continues, in chunks of iterations."""

    def __init__(self, program: msrl.Program, state: Any):
        self._program, self._state = program, state

    def run(self, seconds: float) -> float:
        """Steps per second of whole chunks that take at least `seconds`."""
        start, done = time.perf_counter(), 0
        while not done or time.perf_counter() - start < seconds:
            self._state, _ = self._program.run(self._state, _CHUNK, chunk=_CHUNK, donate=True)
            done += _CHUNK * UNROLL * NUM_ENVS
        return done / (time.perf_counter() - start)


def measure(workers: int, delays: Sequence[float], repeats: int, seconds: float) -> Iterator[dict[str, Any]]:
    """For each delay, the steps per second of all variants, measured alternately."""
    with tempfile.NamedTemporaryFile() as file:
        delay_now = np.memmap(file.name, np.float64, "w+", shape=1)
        runners = [Training(*made(groups, staleness, workers, file.name)) for groups, staleness in VARIANTS.values()]
        interleave(runners, 0.0, 1)  # compiles
        for delay in delays:
            load, delay_now[0] = os.getloadavg()[0], delay
            runs = dict(zip(VARIANTS, interleave(runners, seconds, repeats), strict=True))
            yield {"workers": workers, "delay": delay, "runs": runs, "load": load, "commit": commit()}


def table(record: Mapping[str, Any]) -> str:
    """A record as Markdown: steps per second of the first variant, and the others' ratios to it within rounds."""
    first, *others = VARIANTS
    head = ("a step sleeps", "workers", f"{first}, steps/s", *others, "load")
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in record["rows"]:
        runs = row["runs"]
        cells = [spread(runs[first], ",.0f")]
        cells += [spread(np.divide(runs[name], runs[first]).tolist(), ".2f") for name in others]
        lines.append(f"| {1e3 * row['delay']:g} ms | {row['workers']} | {' | '.join(cells)} | {row['load']:.1f} |")
    about, versions = record["machine"], ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"Medians of {record['repeats']} rounds of {record['seconds']:g} s or {_CHUNK} iterations, whichever is longer, "
            "with the least and the greatest; the three columns before the last are ratios within rounds. "
            f"{about['cores']} cores of {about['cpu']}, commit {record['rows'][0]['commit']}. {versions}.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, and writes the record and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS, help="seconds that a step sleeps")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="processes that simulate; even numbers")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="approximate length of a round")
    parser.add_argument("--json", type=Path, required=True, help="write the record here")
    parser.add_argument("--docs", type=Path, help="rewrite the table in this page")
    args = parser.parse_args(argv)
    page_before = args.docs and rewrite(args.docs.read_text(), "groups", "")  # says what is missing before anything runs
    record: dict[str, Any] = {"machine": machine(), "versions": our_versions()}
    record |= {"repeats": args.repeats, "seconds": args.seconds, "rows": []}
    for workers in args.workers:
        for row in measure(workers, args.delays, args.repeats, args.seconds):
            record["rows"].append(row)
            args.json.write_text(json.dumps(record, indent=1) + "\n")
            print(row, flush=True)
    if page_before:
        args.docs.write_text(rewrite(args.docs.read_text(), "groups", table(record)))
    print(table(record))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main()
