"""Host simulators, parallel Q-learning and the inference of several agents, compared with Ray's actors on the same cores.

These are the four comparisons with Ray's actors that Reactor (Lingua Franca, arXiv 2312.04704) reports, with msrl_jax in its
place. Atari's Pong wants `pip install ale-py` on both sides; frames of its size stand in for Atari games that cost nothing.

    python3.11 -m venv /tmp/rllib && /tmp/rllib/bin/pip install ray==2.60.0 gymnasium==1.2.2 ale-py==0.12.1
    python benchmarks/reactor.py --ray /tmp/rllib/bin/python --json benchmarks/results/reactor.json --docs benchmarks/README.md

They run alternately. Without `--ray`, msrl_jax alone is measured.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from comparison import Peer, Setting, chosen, machine, our_versions, rewrite, spread, versions_of
from hosts import Simulating
from jax.sharding import PartitionSpec as P
from reactor_worker import DISCOUNT, EPSILON, STEP_SIZE, Frames, World, networks

import msrl_jax as msrl
from msrl_jax.report.bench import Runner, interleave
from msrl_jax.report.provenance import commit

HOST, DEVICE, STEP, UNROLL = "msrl_jax", "msrl_jax, all of it in JAX", "Ray, a call per step", "Ray, a call per unroll"
COLUMNS = (HOST, DEVICE, STEP, UNROLL)
TWO = {"num_envs": 16, "num_workers": 2, "unroll_length": 32}
PONG, GRAY = "ale_py:ALE/Pong-v5", {"obs_type": "grayscale"}
LAKE, FIRM = "gymnasium:FrozenLake-v1:is_slippery=False,num_workers=2", {"is_slippery": False}
SETTINGS = [
    Setting("simulate", "gymnasium:CartPole-v1:num_workers=2", TWO | {"peer_env": "CartPole-v1"}),
    Setting("simulate", "reactor:frames", TWO | {"peer_env": "frames"}),
    Setting("simulate", "reactor:pong", TWO | {"peer_env": PONG, "params": GRAY}),
    *(Setting("q_learning", LAKE, TWO | {"peer_env": "FrozenLake-v1", "params": FIRM, "unroll_length": n}) for n in (1, 32)),
    *(Setting("inference", f"{n} agents", {"agents": n, "num_envs": 1, "unroll_length": 128}) for n in (2, 8)),
]
_CHUNK = 128  # steps of each environment between two readings of the metrics


def frames() -> msrl.envs.GymnasiumEnvironment:
    """The stand-in for Atari, in two worker processes."""
    return msrl.envs.GymnasiumEnvironment(Frames, "frames", num_workers=2)


def pong() -> msrl.envs.GymnasiumEnvironment:
    """Atari's Pong, in two worker processes."""
    return msrl.envs.GymnasiumEnvironment(functools.partial(gymnasium.make, PONG, **GRAY), "pong", num_workers=2)


class Lake:
    """FrozenLake's map of 4 by 4, not slippery, in JAX."""

    observation_space, action_space = msrl.envs.Discrete(16), msrl.envs.Discrete(4)

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Begins in a corner; the state is the place and the number of steps."""
        return (jnp.int32(0), jnp.int32(0)), jnp.int32(0)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        """Moves left, down, right or up; holes and the goal end the episode, and so do 100 steps."""
        place, steps = state
        row, column = place // 4 + jnp.array([0, 1, 0, -1])[action], place % 4 + jnp.array([-1, 0, 1, 0])[action]
        place, steps = 4 * jnp.clip(row, 0, 3) + jnp.clip(column, 0, 3), steps + 1
        ends = (place == jnp.array([5, 7, 11, 12, 15])).any()
        return (place, steps), place, jnp.float32(place == 15), ends, steps == 100


def q_learning(env: Any, num_envs: int, unroll_length: int, policy: str) -> tuple[msrl.Program, Any]:
    """Synchronous parallel Q-learning of a table that is the same for all environments during an unroll.

    Returns:
      The program, and the first state: the table `[S, A]`, the environments', observations and a key.
    """
    venv = msrl.envs.vectorize(env, num_envs)
    num_actions = env.action_space.n

    @msrl.fragment(role="actor")
    def act(q, obs, key):
        at_random, which = jax.random.split(key)
        explores = jax.random.bernoulli(at_random, EPSILON, obs.shape)
        return jnp.where(explores, jax.random.randint(which, obs.shape, 0, num_actions), q[obs].argmax(-1))

    @msrl.fragment(role="env")
    def env_step(env_state, action):
        return venv.step(env_state, action)

    @msrl.fragment(role="learner")
    def learn(q, obs, action, t):
        target = t.reward + DISCOUNT * ~t.terminated * q[t.final_obs].max(-1)
        return q.at[obs, action].add(STEP_SIZE * (target - q[obs, action]))

    def iteration(state):
        q, env_state, obs, key = state

        def step(before, key):
            action = act(q, before[1], key)
            env_state, t = env_step(before[0], action)
            return (env_state, t.obs), (before[1], action, t)

        key, *keys = jax.random.split(key, unroll_length + 1)
        (env_state, obs), (seen, action, t) = jax.lax.scan(step, (env_state, obs), jnp.stack(keys))
        return (learn(q, seen, action, t), env_state, obs, key), {"reward": t.reward.mean()}

    state = jnp.ones((env.observation_space.n, num_actions)), *venv.reset(jax.random.key(0)), jax.random.key(1)
    axes = P(), venv.axes, P("env"), P()
    return msrl.compile(iteration, state, policy=msrl.policies.get(policy), axes=axes, devices=jax.devices()[:1]), state


def inference(agents: int, unroll_length: int) -> tuple[msrl.Program, Any]:
    """A program in which each agent acts with its own network, on observations from the host; and its first state."""
    seen = jax.ShapeDtypeStruct(World(agents).obs.shape, jnp.float32)
    world = msrl.fragments.host_fragment(World(agents), seen, name="world")

    @msrl.fragment(role="actor")
    def act(weights, obs):
        for w in weights[:-1]:
            obs = jnp.tanh(jnp.einsum("ai,aio->ao", obs, w))
        return jnp.einsum("ai,aio->ao", obs, weights[-1]).argmax(-1)

    def iteration(state):
        weights, action = state
        action, actions = jax.lax.scan(lambda a, _: (act(weights, world(a)), a), action, length=unroll_length)
        return (weights, action), {"action": actions.mean()}

    weights = [jnp.stack(w) for w in zip(*networks(agents), strict=True)]
    state = weights, jnp.zeros(agents, jnp.int32)
    policy = msrl.policies.MultiLearner(num_devices=1)
    return msrl.compile(iteration, state, policy=policy, devices=jax.devices()[:1]), state


def running(program: msrl.Program, state: Any, num_envs: int, unroll_length: int) -> Runner:
    """A runner of a program."""
    count = _CHUNK // unroll_length
    return Runner(lambda state: program.run(state, count, chunk=count, donate=True)[0], state, _CHUNK * num_envs)


def ours(setting: Setting) -> dict[str, Any]:
    """The runners of msrl_jax by column."""
    config = setting.config
    num_envs, length = config["num_envs"], config["unroll_length"]
    if setting.algo == "simulate":
        return {HOST: Simulating(setting.env, num_envs)}
    if setting.algo == "inference":
        return {HOST: running(*inference(config["agents"], length), num_envs, length)}
    made = {HOST: (msrl.envs.make(setting.env), "MultiLearner"), DEVICE: (Lake(), "GPUOnly")}
    return {
        column: running(*q_learning(env, num_envs, length, policy), num_envs, length) for column, (env, policy) in made.items()
    }


@dataclasses.dataclass(frozen=True)
class Calling:
    """Ray's actors, called in one of two ways."""

    peer: Peer
    call: str

    def run(self, seconds: float) -> float:
        """Steps per second, over about `seconds`."""
        return self.peer.ask(json.dumps({"seconds": seconds, "call": self.call}))["steps_per_second"]


CALLS = {"simulate": {STEP: "step", UNROLL: "unroll"}, "q_learning": {UNROLL: "unroll"}, "inference": {STEP: "step"}}


def measure(setting: Setting, command: Sequence[str | Path], repeats: int, seconds: float) -> dict[str, Any]:
    """Steps per second of all rounds, by column; Ray's if a command starts it."""
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        runners, versions = ours(setting), {}
        if command:
            peer = stack.enter_context(Peer(command, setting))
            runners |= {column: Calling(peer, call) for column, call in CALLS[setting.algo].items()}
            versions = peer.about["versions"]
        runs = dict(zip(runners, interleave(list(runners.values()), seconds, repeats), strict=True))
    row = {"label": setting.label, "setting": dataclasses.asdict(setting), "runs": runs, "load": load}
    return row | {"commit": commit(), "peer_versions": versions}


def table(record: Mapping[str, Any]) -> str:
    """A record as Markdown: steps per second, their ratios within rounds, and what they were measured on."""
    pairs = ((HOST, STEP), (HOST, UNROLL), (DEVICE, UNROLL))
    short = {HOST: "msrl_jax", DEVICE: "in JAX", STEP: "per step", UNROLL: "per unroll"}
    head = [*COLUMNS, *(f"{short[a]} : {short[b]}" for a, b in pairs), "load"]
    lines = [f"| steps/s | {' | '.join(head)} |", "|---" + "|---:" * len(head) + "|"]
    for row in record["rows"]:
        runs = row["runs"]
        cells = [spread(runs[c], ",.0f") if c in runs else "-" for c in COLUMNS]
        for a, b in pairs:
            both = a in runs and b in runs
            cells.append(spread(np.divide(runs[a], runs[b]).tolist(), ",.2f") if both else "-")
        lines.append(f"| {row['label']} | {' | '.join(cells)} | {row['load']:.1f} |")
    about = record["machine"]
    versions = versions_of(record, "Ray")
    return "\n".join(
        [
            *lines,
            "",
            f"Medians of {record['repeats']} rounds of {record['seconds']:g} s, with the least and the greatest; ratios are "
            f"those within rounds. {about['cores']} cores of {about['cpu']}, commit {record['rows'][0]['commit']}. {versions}.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, and writes the record and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", help="the Python of an environment with Ray")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="measure the settings with a WORD in their label")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--seconds", type=float, default=1.5, help="approximate length of a round")
    parser.add_argument("--json", type=Path, required=True, help="write the record here")
    parser.add_argument("--docs", type=Path, help="rewrite the table in this page")
    args = parser.parse_args(argv)
    page_before = args.docs and rewrite(args.docs.read_text(), "reactor", "")  # says what is missing before anything runs
    try:
        selected = chosen(SETTINGS, args.only)
    except ValueError as error:
        parser.error(str(error))
    command = [args.ray, Path(__file__).with_name("reactor_worker.py")] if args.ray else []
    record: dict[str, Any] = {"machine": machine(), "versions": our_versions()}
    record |= {"repeats": args.repeats, "seconds": args.seconds, "rows": []}
    for setting in selected:
        record["rows"].append(measure(setting, command, args.repeats, args.seconds))
        args.json.write_text(json.dumps(record, indent=1) + "\n")
        print(setting.label, {c: spread(x, ",.0f") for c, x in record["rows"][-1]["runs"].items()}, flush=True)
    if page_before:
        args.docs.write_text(rewrite(args.docs.read_text(), "reactor", table(record)))
    print(table(record))


if __name__ == "__main__":
    main()
