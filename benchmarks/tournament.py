"""Tournaments: the time until a return is reached, against evolution in generations, with workers of four speeds.

    python benchmarks/tournament.py --json benchmarks/results/tournament.json

Four processes train PPO on CartPole-v1; process `k` takes `k` times as long for its steps (it sleeps, so cores do not matter).
In generations, a worker waits after every round until all have done theirs. In a tournament, no worker waits. Otherwise equal:
rounds, leaderboard, draws. Both take turns, with the same seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from msrl_jax.run import Tick
from msrl_jax.tournament import Leaderboard, compete

WORKERS, ROUND, TARGET = 4, 4096, 475.0
PPO = {"num_envs": 4, "unroll_length": 128, "num_minibatches": 4, "hidden_sizes": (32, 32), "learning_rate": 5e-4}


def work(board: str, number: int, seed: int, in_generations: bool, seconds: float) -> None:
    """One worker, until the target is reached.

    Args:
      board: folder of the leaderboard.
      number: its number, from 1: how many times `seconds` a round takes.
      seed: the seed of the repetition.
      in_generations: whether it waits for the others after each round.
      seconds: time of a round of the fastest worker.
    """
    last = 0

    def slowly(tick: Tick) -> None:
        nonlocal last
        begun = last if tick.resumed_from <= last < tick.step else tick.resumed_from
        time.sleep(number * seconds * (tick.step - begun) / ROUND)
        last = tick.step

    options: dict[str, Any] = {"round_steps": ROUND, "total_steps": 2_000_000, "eval_episodes": 32, "size": WORKERS}
    options |= {"fresh": 0.0, "target": TARGET, "callbacks": [slowly], **PPO}
    if not in_generations:
        compete(board, "ppo", "CartPole-v1", seed=WORKERS * seed + number, **options)
        return
    generation = 0
    while True:
        generation += 1
        found = compete(board, "ppo", "CartPole-v1", seed=1000 * generation + WORKERS * seed + number, rounds=1, **options)
        while len(found.rounds) < WORKERS * generation and reached(found) is None:
            time.sleep(0.02)
        if reached(found) is not None:
            return


def reached(board: Leaderboard) -> float | None:
    """When the target was reached, in seconds since the first round ended; None if it was not."""
    rounds = board.rounds
    when = next((row["seconds"] for row in rounds if row["best"] >= TARGET), None)
    return None if when is None else when - rounds[0]["seconds"]


def measure(seed: int, in_generations: bool, seconds: float) -> dict[str, Any]:
    """Lets all workers work on a new board, and returns the time that they took and the rounds that they did."""
    with tempfile.TemporaryDirectory() as folder:
        board = str(Path(folder, "board"))
        arguments = [board, str(seed), str(int(in_generations)), str(seconds)]
        command = [sys.executable, __file__, "--work", *arguments]
        processes = [subprocess.Popen([*command, str(number)]) for number in range(1, WORKERS + 1)]
        for process in processes:
            process.wait()
        found = Leaderboard(board)
        return {"seconds": reached(found), "rounds": len(found.rounds)}


def main() -> None:
    """Reads the command line, measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a round of the fastest worker")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        board, seed, in_generations, seconds, number = args.work
        work(board, int(number), int(seed), in_generations == "1", float(seconds))
        return
    record: dict[str, Any] = {"target": TARGET, "round_steps": ROUND, "config": PPO, "tournament": [], "generations": []}
    for seed in range(args.repeats):
        for name in ("tournament", "generations")[:: -1 if seed % 2 else 1]:
            found = measure(seed, name == "generations", args.seconds)
            record[name].append(found)
            print(f"seed {seed}, {name}: {TARGET:g} after {found['seconds']:.1f} s and {found['rounds']} rounds", flush=True)
    medians = [statistics.median(x["seconds"] for x in record[name]) for name in ("generations", "tournament")]
    print(f"medians: {medians[0]:.1f} s in generations, {medians[1]:.1f} s in a tournament: {medians[0] / medians[1]:.2f} x")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
