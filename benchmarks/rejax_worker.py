"""Trains with Rejax for `compare_rejax.py`, which starts it with the Python of an environment that has Rejax."""

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import rejax
from serving import Loop, compiled, serve, versions


def ppo(setting: dict) -> dict:
    """Rejax's arguments for a setting of PPO."""
    names = {"num_steps": "unroll_length", "num_epochs": "num_epochs", "num_minibatches": "num_minibatches"}
    names |= {"gae_lambda": "gae_lambda", "clip_eps": "clip_ratio", "ent_coef": "entropy_coef", "vf_coef": "value_coef"}
    agent = {"hidden_layer_sizes": setting["hidden_sizes"], "activation": setting["activation"]}
    return {theirs: setting[ours] for theirs, ours in names.items()} | {"agent_kwargs": agent}


def off_policy(setting: dict) -> dict:
    """Rejax's arguments for a setting of an off-policy algorithm; Rejax takes one step per iteration.

    Its networks have two layers of width 64, and other widths are not possible.
    """
    names = {"num_epochs": "num_updates", "buffer_size": "replay.capacity", "fill_buffer": "replay.learning_starts"}
    names |= {"batch_size": "batch_size"}
    fixed = {"polyak": 1 - setting["tau"], "target_update_freq": 1}
    return {theirs: setting[ours] for theirs, ours in names.items()} | fixed


def dqn(setting: dict) -> dict:
    """Rejax's arguments for a setting of DQN."""
    return off_policy(setting) | {"agent_kwargs": {"activation": setting["activation"]}, "ddqn": setting["target"] == "double"}


def sac(setting: dict) -> dict:
    """Rejax's arguments for a setting of SAC."""
    return off_policy(setting) | {"agent_kwargs": {"activation": setting["activation"]}}


def td3(setting: dict) -> dict:
    """Rejax's arguments for a setting of TD3; an iteration of Rejax takes `policy_period` steps."""
    networks = {name: {"activation": setting["activation"]} for name in ("actor_kwargs", "critic_kwargs")}
    noise = {"policy_delay": setting["policy_period"], "exploration_noise": setting["exploration_noise"]}
    return off_policy(setting) | networks | noise


ALGORITHMS = {"ppo": ("PPO", ppo), "dqn": ("DQN", dqn), "sac": ("SAC", sac), "td3": ("TD3", td3)}


def population(algorithm: Any, rates: jax.Array) -> tuple[Callable, Callable, jax.Array]:
    """PPO with several learning rates: `init(keys)`, `train(states)`, and the keys.

    A state of Rejax holds its optimizer, which holds the rate: it is taken out between two chunks.
    """

    def optimizer(rate: Any) -> optax.GradientTransformation:
        return optax.chain(optax.clip(algorithm.max_grad_norm), optax.adam(learning_rate=rate))

    def with_optimizer(state: Any, tx: Any) -> Any:
        return state.replace(actor_ts=state.actor_ts.replace(tx=tx), critic_ts=state.critic_ts.replace(tx=tx))

    def train(rate: jax.Array, state: Any) -> Any:
        return with_optimizer(algorithm.train(train_state=with_optimizer(state, optimizer(rate)))[0], None)

    init = jax.vmap(lambda key: with_optimizer(algorithm.init_state(key), None))
    return init, lambda states: jax.vmap(train)(rates, states), jax.random.split(jax.random.PRNGKey(0), len(rates))


def training(algo: str, env: str, seeds: int, setting: dict) -> Loop:
    """Trains `seeds` runs in one program, without evaluation; each chunk continues the last one."""
    steps = setting["num_envs"] * setting["unroll_length"] * setting.get("policy_period", 1)
    name, arguments = ALGORITHMS[algo]
    state = None

    def make(iterations: int):
        nonlocal state
        algorithm = getattr(rejax, name).create(
            env=env,
            num_envs=setting["num_envs"],
            **arguments(setting),
            gamma=setting["discount"],
            learning_rate=np.ravel(setting["learning_rate"])[0].item(),
            max_grad_norm=setting["max_grad_norm"],
            total_timesteps=iterations * steps,
            eval_freq=iterations * steps,
            skip_initial_evaluation=True,
        )
        algorithm = algorithm.replace(eval_callback=lambda algorithm, state, key: ())
        init, train = algorithm.init_state, lambda state: algorithm.train(train_state=state)[0]
        key = jax.random.PRNGKey(0)
        if isinstance(setting["learning_rate"], list):
            init, train, key = population(algorithm, jax.numpy.array(setting["learning_rate"]))
        elif seeds > 1:
            init, train, key = jax.vmap(init), jax.vmap(train), jax.random.split(key, seeds)
        if state is None:
            state = jax.jit(init)(key)
        program, seconds = compiled(train, state)

        def chunk():
            nonlocal state
            state = program(state)
            return state

        return chunk, seconds

    # Updates start when the buffer holds `learning_starts` steps.
    members = seeds * np.size(setting["learning_rate"])
    return Loop(make, members * steps, first=2 + setting.get("replay.learning_starts", 0) // steps)


def main() -> None:
    """Reads the setting and serves it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", type=json.loads, required=True, help="the fields of a `Setting`, as JSON")
    setting = parser.parse_args().setting
    loop = training(setting["algo"], setting["env"], setting["seeds"], setting["config"])
    serve(loop, versions("rejax", "jax", "jaxlib", "flax", "optax", "distrax", "gymnax"))


if __name__ == "__main__":
    main()
