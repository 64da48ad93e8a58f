"""Population based training of PPO from bad learning rates, against the same learning rates fixed, at equal steps.

    python benchmarks/pbt.py [--seeds 0 1 2 3 4] [--overhead]

Prints one line of JSON per seed, and a summary. The score is the mean return of 128 greedy episodes: with PBT, that of the
member with the best training return at the end; of the fixed learning rates, the best score of all members, which favors them.
`--overhead` measures instead what exploit and explore add to an iteration.
"""

import argparse
import json
import time
from typing import Any

import jax
import numpy as np

import msrl_jax as msrl
from msrl_jax.run.prepare import make_experiment

ENV, MEMBERS = "Pendulum-v1", 8
RATES = tuple(float(x) for x in np.geomspace(1e-6, 1e-4, MEMBERS))
"""Learning rates that are too low by one to three orders of magnitude."""
PPO = {
    "num_envs": 16,
    "unroll_length": 64,
    "num_epochs": 4,
    "num_minibatches": 4,
    "hidden_sizes": (32, 32),
    "discount": 0.95,
    "normalize_rewards": True,
    "normalize_observations": True,
}
SEARCH = msrl.PBT(
    search={"learning_rate": msrl.envs.log_uniform(1e-6, 1e-2)},
    members=MEMBERS,
    every=8,
    fraction=0.25,
    explore="resample",
    resample_probability=0.5,
)
STEPS = 200 * 1024


def compare(seed: int, pbt: msrl.PBT = SEARCH, steps: int = STEPS) -> dict[str, Any]:
    """Trains both populations with one seed.

    Args:
      seed: the number of the repetition; no two have a seed of a member in common.
      pbt: how one of them is trained.
      steps: environment steps of every member.

    Returns:
      The scores, and the learning rates of the members that were scored.
    """
    scores: dict[str, float] = {"seed": seed}
    config: dict[str, Any] = PPO
    for name, trained in (("pbt", pbt), ("fixed", None)):
        result = msrl.train(
            "ppo",
            ENV,
            total_steps=steps,
            seed=seed * MEMBERS,
            eval_episodes=0,
            progress=False,
            learning_rate=RATES,
            chunk=pbt.every,
            pbt=trained,
            devices=jax.devices()[:1],
            **config,
        )
        members = [result.best] if trained else range(MEMBERS)
        returns = [float(result.evaluate(128, seed=seed, member=m).mean_return) for m in members]
        best, scores[name] = members[int(np.argmax(returns))], max(returns)
        scores[f"{name}_rate"] = float(result.history["pbt/learning_rate"][-1][best]) if trained else RATES[best]
        scores[f"{name}_seconds"] = round(result.wall_seconds, 1)
    return scores


def overhead(every: int = 20, periods: int = 5, repeats: int = 15) -> dict[str, Any]:
    """Seconds of an exploit period without and with exploits, the fastest of several repeats, measured alternately."""
    pbt = msrl.PBT(search=SEARCH.search, members=MEMBERS, every=every)
    experiments = {
        "independent": make_experiment("ppo", ENV, **{**PPO, "learning_rate": RATES}),
        "pbt": make_experiment("ppo", ENV, **{**PPO, "learning_rate": RATES}, pbt=pbt),
    }
    seconds: dict[str, list[float]] = {name: [] for name in experiments}
    programs = {name: each.compile(msrl.policies.GPUOnly(), jax.devices()[:1]) for name, each in experiments.items()}
    states = {name: each.start(programs[name]) for name, each in experiments.items()}
    for repeat in range(repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            states[name], _ = program.run(states[name], every * periods, chunk=every, donate=True)
            jax.block_until_ready(states[name])
            if repeat:  # the first one compiles
                seconds[name].append((time.perf_counter() - start) / periods)
    best = {name: min(values) for name, values in seconds.items()}
    return {"platform": jax.devices()[0].platform, "every": every, **best, "overhead": best["pbt"] / best["independent"] - 1}


def main() -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--overhead", action="store_true")
    args = parser.parse_args()
    if args.overhead:
        print(json.dumps(overhead()))
        return
    rows = []
    for seed in args.seeds:
        rows.append(compare(seed))
        print(json.dumps(rows[-1]), flush=True)
    pbt, fixed = ([row[name] for row in rows] for name in ("pbt", "fixed"))
    for name, scores in (("pbt", pbt), ("fixed", fixed)):
        print(f"{name}: {np.mean(scores):.1f} ({min(scores):.1f} to {max(scores):.1f})")
    print(f"pbt is better in {sum(a > b for a, b in zip(pbt, fixed, strict=True))} of {len(rows)} repetitions")


if __name__ == "__main__":
    main()
