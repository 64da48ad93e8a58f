"""RL^2 (Duan et al., 2016, arXiv 1611.02779) and RL^3 (Bhatia et al., 2023, arXiv 2306.15909): a memory learns how to learn.

    python examples/rl3.py --tasks mdps --svg docs/example_rl3.svg
    python examples/rl3.py --tasks bandits

An agent with a memory plays meta-episodes: several episodes of one task, which it does not know. RL^2 shows it the last action
and reward. RL^3 also shows it the action values of a model that is estimated within the meta-episode. Everything is made of
parts of the package: `meta.RL2`, `meta.RL3`, distributions of tasks as `env_params`, and `recurrent_ppo`.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import msrl_jax as msrl
from msrl_jax import meta
from msrl_jax.cli import argument_types
from msrl_jax.report import curves

SETTINGS = {
    "num_envs": 32,
    "learning_rate": 3e-3,
    "anneal_learning_rate": True,
    "discount": 0.9,
    "gae_lambda": 0.3,
    "hidden_sizes": (64,),
}


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Tasks to learn on, and others to play afterwards.

    Attributes:
      env: the environment whose parameters are the task.
      episode_length: steps of an episode.
      horizon: steps of a meta-episode.
      learned: the distribution of tasks in training.
      others: other distributions of tasks to evaluate, by name.
    """

    env: Any
    episode_length: int
    horizon: int
    learned: Callable
    others: dict[str, Callable]


def mdps(num_states: int = 5, num_actions: int = 3, horizon: int = 64) -> Tasks:
    """Random MDPs; the others have uniform rewards, like the authors', or also nearly deterministic transitions."""
    shape = num_states, num_actions
    env = meta.TabularMDP(np.full((*shape, num_states), 1 / num_states), np.ones(shape))
    draw = meta.random_mdps
    others = {
        "uniform rewards": draw(*shape, uniform_rewards=True),
        "and near determinism": draw(*shape, uniform_rewards=True, concentration=0.1),
    }
    return Tasks(env, 8, horizon, draw(*shape), others)


def bandits() -> Tasks:
    """Bandits of five arms, whose probabilities are uniform."""
    return Tasks(meta.BernoulliBandit(np.full(5, 0.5)), 1, 64, meta.random_bandits(5), {})


TASKS = {"mdps": mdps, "large_mdps": lambda: mdps(10, 5, 128), "bandits": bandits}


def wrapped(tasks: Tasks, is_rl3: bool) -> Any:
    """The meta-environment of RL^2 or RL^3."""
    env = meta.RL2(tasks.env, tasks.horizon, tasks.episode_length)
    return meta.RL3(env) if is_rl3 else env


def rewards(tasks: Tasks, is_rl3: bool, seeds: int, steps: int, episodes: int, **where: Any) -> dict[str, np.ndarray]:
    """Trains an agent on each seed and lets it play; rewards per step in each quarter of the horizon, by tasks. `[seeds, 4]`"""
    result = msrl.train(
        "recurrent_ppo",
        wrapped(tasks, is_rl3),
        env_params=tasks.learned,
        total_steps=steps,
        seeds=seeds,
        eval_episodes=0,
        progress=False,
        unroll_length=tasks.horizon,
        **SETTINGS,
        **where,
    )

    def quarters(member: int, distribution: Callable) -> np.ndarray:
        played = result.evaluate(episodes, seed=1000, member=member, env_params=distribution).metrics
        return np.array([np.mean(played[f"return_quarter_{i}"]) for i in (1, 2, 3, 4)]) * 4 / tasks.horizon

    every = {"as in training": tasks.learned, **tasks.others}
    return {name: np.stack([quarters(member, draw) for member in range(seeds)]) for name, draw in every.items()}


def best(tasks: Tasks, distribution: Callable, number: int = 2000) -> float:
    """The reward per step of who knows the task, on average over tasks."""
    drawn = jax.vmap(distribution)(jax.random.split(jax.random.key(0), number))
    if "success" in drawn:
        return float(drawn["success"].max(-1).mean())
    solve = jax.vmap(lambda p, r: meta.value_iteration(p, r, 1.0, tasks.episode_length))
    return float(solve(drawn["transitions"], drawn["rewards"])[:, 0].max(-1).mean() / tasks.episode_length)


def figure(found: dict[str, dict[str, np.ndarray]], limits: dict[str, float], horizon: int) -> str:
    """Draws rewards per step over the meta-episode, by algorithm and tasks `[seeds, 4]`, with 95% intervals of the means."""
    with curves.styled():
        drawn, panels = curves.figure_of(len(limits))
        for panel, (name, limit) in zip(panels, limits.items(), strict=True):
            for number, (algorithm, rows) in enumerate(found.items()):
                middle = (np.arange(4) + 0.5) * horizon / 4
                curves.draw_curve(panel, algorithm, number, *curves.mean_curve(middle, rows[name].T))
            panel.axhline(limit, color="gray", lw=1, ls=":", label="task known")
            panel.set(title=name, xlabel="step of the meta-episode", ylabel="reward per step")
        return curves.svg_of(curves.finished(drawn))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains both algorithms on all seeds, and prints what they earn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", choices=TASKS, default="mdps")
    parser.add_argument("--seeds", type=argument_types.positive_int, default=5, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--steps", type=argument_types.positive_int, default=500_000, help="environment steps of each seed")
    parser.add_argument(
        "--episodes", type=argument_types.positive_int, default=512, help="meta-episodes that each agent plays afterwards"
    )
    parser.add_argument("--policy", default="GPUOnly")
    parser.add_argument("--cpu-devices", type=argument_types.cpu_devices)
    parser.add_argument("--svg", type=argument_types.new_file, help="file for a figure")
    parser.add_argument("--json", type=argument_types.new_file, help="file for the numbers")
    args = parser.parse_args(arguments)
    tasks = TASKS[args.tasks]()
    found = {
        name: rewards(tasks, is_rl3, args.seeds, args.steps, args.episodes, policy=args.policy)
        for name, is_rl3 in {"RL^2": False, "RL^3": True}.items()
    }
    limits = {name: best(tasks, draw) for name, draw in {"as in training": tasks.learned, **tasks.others}.items()}
    for name, limit in limits.items():
        print(f"{args.tasks}, {name}: {limit:.3f} if the task is known")
        for algorithm, by_tasks in found.items():
            print(f"  {algorithm}", *by_tasks[name].mean(0).round(3), "the last on each seed", *by_tasks[name][:, 3].round(3))
    if args.json:
        numbers = {algorithm: {name: rows.tolist() for name, rows in by.items()} for algorithm, by in found.items()}
        args.json.write_text(json.dumps(numbers | {"task known": limits}))
    if args.svg:
        args.svg.write_text(figure(found, limits, tasks.horizon))


if __name__ == "__main__":
    main()
