"""Steps per second of environments with random actions: here, and in the suite's own vectorized loop with its own resets.

    pip install '.[envs]'
    python benchmarks/suites.py --json benchmarks/results/suites.json

The suites differ in what a reset is: Brax and Playground go back to the first state of each environment, Jumanji draws a new
one where an episode ended, and the others draw one in every step. Here, every episode begins with a new state; expensive ones
come from a pool (Craftax, Playground). Both run the same number of environments on the same device, alternately.
"""

import argparse
import importlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from msrl_jax import envs
from msrl_jax.envs.masks import mask_of, sample_legal
from msrl_jax.report.bench import Runner, interleave

Loop = tuple[Callable[[jax.Array], Any], Callable[[Any, Any, jax.Array], Any]]
"""`reset(keys[E]) -> state`, and `step(state, actions[E], keys[E]) -> state`."""

SIZES = {"brax": 64, "playground": 32, "craftax": 64, "xminigrid": 512, "jumanji": 256, "gymnax": 1024}
NAMES = (
    "brax:inverted_pendulum",
    "brax:halfcheetah",
    "playground:CartpoleBalance",
    "playground:CheetahRun",
    "craftax:Craftax-Classic-Symbolic-v1",
    "xminigrid:MiniGrid-EmptyRandom-8x8",
    "xminigrid:XLand-MiniGrid-R1-9x9",
    "jumanji:Snake-v1",
    "jumanji:Game2048-v1",
    "CartPole-v1",
    "Breakout-MinAtar",
)


def brax(name: str, num_envs: int) -> Loop:
    """Brax with the wrappers that its algorithms use."""
    env = importlib.import_module("brax.envs").create(name, batch_size=num_envs)
    return (lambda keys: env.reset(keys[0])), (lambda state, action, keys: env.step(state, action))


def playground(name: str, num_envs: int) -> Loop:
    """Playground with the wrappers that its training scripts use."""
    package = importlib.import_module("mujoco_playground")
    config = package.registry.get_default_config(name)
    config.update({"impl": "jax"} if "impl" in config else {})
    own = package.registry.load(name, config)
    env = package.wrapper.wrap_for_brax_training(own, config.episode_length, config.get("action_repeat", 1))
    return (  # its wrapper counts the dimensions of untyped keys
        lambda keys: env.reset(jax.random.key_data(keys)),
        lambda state, action, keys: env.step(state, action),
    )


def craftax(name: str, num_envs: int) -> Loop:
    """Craftax with its own resets."""
    env = importlib.import_module("craftax.craftax_env").make_craftax_env_from_name(name, True)
    params = env.default_params
    return (
        lambda keys: jax.vmap(env.reset, (0, None))(keys, params)[::-1],
        lambda state, action, keys: jax.vmap(env.step, (0, 0, 0, None))(keys, state[0], action, params)[1::-1],
    )


def xminigrid(name: str, num_envs: int) -> Loop:
    """XLand-MiniGrid with the wrapper that its baselines use."""
    env, params = importlib.import_module("xminigrid").make(name)
    env = importlib.import_module("xminigrid.wrappers").GymAutoResetWrapper(env)
    return (
        lambda keys: jax.vmap(env.reset, (None, 0))(params, keys),
        lambda state, action, keys: jax.vmap(env.step, (None, 0, 0))(params, state, action),
    )


def jumanji(name: str, num_envs: int) -> Loop:
    """Jumanji with the faster of its wrappers, which resets one environment after another, and only those that ended."""
    env = importlib.import_module("jumanji").make(name)
    env = importlib.import_module("jumanji.wrappers").VmapAutoResetWrapper(env)
    return env.reset, lambda state, action, keys: env.step(state[0], action)


def gymnax(name: str, num_envs: int) -> Loop:
    """gymnax with its own resets."""
    env, params = importlib.import_module("gymnax").make(name)
    return (
        lambda keys: jax.vmap(env.reset, (0, None))(keys, params)[::-1],
        lambda state, action, keys: jax.vmap(env.step, (0, 0, 0, None))(keys, state[0], action, params)[1::-1],
    )


THEIRS = {
    "brax": brax,
    "playground": playground,
    "craftax": craftax,
    "xminigrid": xminigrid,
    "jumanji": jumanji,
    "gymnax": gymnax,
}


def ours(env: envs.Environment, num_envs: int) -> Loop:
    """The environments as algorithms step them."""
    venv = envs.vectorize(env, num_envs)
    return (lambda keys: venv.reset(keys[0])), (lambda state, action, keys: _kept(*venv.step(state[0], action)))


def _kept(state: Any, timestep: Any) -> Any:
    return state, timestep.obs


def runner(loop: Loop, env: envs.Environment, num_envs: int, length: int = 64) -> Runner:
    """Steps environments with random legal actions, `length` steps in one program."""
    reset, step = loop

    def one(carry: Any, _: None) -> tuple[Any, None]:
        state, key = carry
        key, actions, steps = jax.random.split(key, 3)
        mask = mask_of(state[1]) if isinstance(state, tuple) and len(state) == 2 else None
        keys = jax.random.split(actions, num_envs)
        sampled = jax.vmap(env.action_space.sample)(keys) if mask is None else jax.vmap(sample_legal)(keys, mask)
        return (step(state, sampled, jax.random.split(steps, num_envs)), key), None

    chunk = jax.jit(lambda carry: jax.lax.scan(one, carry, None, length)[0])
    key = jax.random.key(0)
    return Runner(chunk, (jax.jit(reset)(jax.random.split(key, num_envs)), key), num_envs * length)


def main() -> None:
    """Reads the command line, measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help="environments")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--seconds", type=float, default=2.0, help="approximate length of a timed run")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    record = {"device": jax.devices()[0].device_kind, "rows": []}
    for name in args.names:
        suite, colon, rest = name.partition(":")
        suite, own = (suite, rest) if colon else ("gymnax", name)
        env, num_envs = envs.make(name), SIZES[suite]
        runners = [runner(loop, env, num_envs) for loop in (ours(env, num_envs), THEIRS[suite](own, num_envs))]
        here, there = (statistics.median(rates) for rates in interleave(runners, args.seconds, args.repeats))
        record["rows"].append({"env": name, "num_envs": num_envs, "ours": here, "theirs": there, "ratio": here / there})
        print(f"{name:<40}{num_envs:>6} environments{here:>14,.0f}{there:>14,.0f} steps/s{here / there:>7.2f} x", flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
