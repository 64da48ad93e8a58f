"""The results of recipes on seeds that were not used for tuning: the last agent of each seed, compared with the recipe's best.

A recipe is accepted if at least 18 of 20 of its last agents come within 5% of the mean score of the best agents in its record.

    python benchmarks/unseen_seeds.py 'ppo-*' --json benchmarks/results/unseen_seeds.json --docs benchmarks/README.md
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comparison import machine, our_versions, rewrite

import msrl_jax as msrl
from msrl_jax.report.provenance import commit
from msrl_jax.run import recipes

FIRST, SEEDS = 20_000, 20  # recipes were chosen on smaller seeds
MARGIN, MOST_MISSES = 0.05, 0.1  # as shares of the best score, and of the seeds


def measure(name: str, first: int = FIRST, seeds: int = SEEDS, **changes: Any) -> dict[str, Any]:
    """Trains the seeds of a recipe as one program, and plays their last agents greedily.

    Args:
      name: the name of the recipe.
      first: the first seed.
      seeds: how many, `S`.
      **changes: fields of the experiment that are not the recipe's, such as `total_steps`.

    Returns:
      The settings, the mean of the recipe's best agents, and for every seed the scores of its evaluations. The last evaluation
      is of the last agent. Scores are means of `episodes` episodes.
    """
    recipe = recipes.find(name)
    record = recipes.record_of(recipe, recipes.records_folder())
    if record is None:
        raise ValueError(f"{name} has no record that says what its best agents reach: msrl-jax reproduce {name} --update")
    experiment = dataclasses.replace(msrl.recipe(name), seed=first, seeds=seeds, **changes)
    episodes, every = 64, max(1, experiment.total_steps // 10)
    result = msrl.train(experiment, eval_every=every, eval_episodes=episodes, progress=False)
    scores = np.reshape(result.history[f"eval_{record.score}"], (-1, seeds))
    scores = scores[~np.isnan(scores).all(1)]
    return {
        "recipe": name,
        "settings": dict(recipe.settings),
        "first": first,
        "best": float(np.mean(record.best)),
        "episodes": episodes,
        "scores": np.round(scores.T, 2).tolist(),
    }


def last_scores(row: Mapping[str, Any]) -> np.ndarray:
    """The score of every seed's last agent. `[S]`"""
    return np.array([scores[-1] for scores in row["scores"]])


def misses(row: Mapping[str, Any]) -> np.ndarray:
    """Whether the last agent of a seed is below the best score by more than the margin. `[S]`"""
    return ~(last_scores(row) >= row["best"] - MARGIN * abs(row["best"]))  # nan is a miss, too


def page(record: Mapping[str, Any]) -> str:
    """The table of a record, and what it was measured with."""
    lines = ["| recipe | best agents | last agents | lowest | within 5% | accepted |", "|---|---:|---:|---:|---:|---|"]
    for row in sorted(record["rows"], key=lambda row: row["recipe"]):
        last, missed = last_scores(row), misses(row)
        accepted = "yes" if missed.sum() <= MOST_MISSES * len(last) else "no"
        lines.append(
            f"| {row['recipe']} | {row['best']:.1f} | {last.mean():.1f} | {last.min():.1f} "
            f"| {len(last) - missed.sum()} of {len(last)} | {accepted} |"
        )
    seeds = sorted({(row["first"], row["first"] + len(row["scores"]) - 1) for row in record["rows"]})
    ranges = ", ".join(f"{first} to {last}" for first, last in seeds)
    cores, versions = record["machine"]["cores"], record["versions"]
    return "\n".join([*lines, "", f"Seeds {ranges}; {cores} cores, JAX {versions['jax']}."])


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, trains, and writes the record and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="names or patterns of recipes; their rows of the record are replaced")
    parser.add_argument("--seed", type=int, default=FIRST, help="the first seed")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--total-steps", type=int, help="steps instead of the recipe's, to try this program")
    parser.add_argument("--json", type=Path, required=True, help="read the record here if it exists, and write it")
    parser.add_argument("--docs", type=Path, help="rewrite the table in this page")
    args = parser.parse_args(argv)
    names = recipes.matching(args.recipes)
    record: dict[str, Any] = {"rows": []} | (json.loads(args.json.read_text()) if args.json.exists() else {})
    record |= {"machine": machine(), "versions": our_versions(), "commit": commit()}
    if args.docs:
        rewrite(args.docs.read_text(), "unseen_seeds", "")  # says what is missing before anything runs
    changes = {} if args.total_steps is None else {"total_steps": args.total_steps}
    for name in names:
        row = measure(name, args.seed, args.seeds, **changes)
        record["rows"] = [other for other in record["rows"] if other["recipe"] != name] + [row]
        args.json.write_text(json.dumps(record) + "\n")
        for seed, scores in enumerate(row["scores"]):
            if misses(row)[seed]:
                print(f"{name}, seed {args.seed + seed}: {scores}", flush=True)
    if args.docs:
        args.docs.write_text(rewrite(args.docs.read_text(), "unseen_seeds", page(record)))
    print(page(record))


if __name__ == "__main__":
    main()
