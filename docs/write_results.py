"""Writes the tables of recipes and of `results.md`: `python docs/write_results.py`, when a record is new.

`benchmarks/records/README.md` has all recipes, from their records. `results.md` has some rows and columns of these tables, and
of those in `benchmarks/README.md`, which the benchmarks write.
"""

import functools
from pathlib import Path

from msrl_jax.report.pages import index, rows

ROOT = Path(__file__).parents[1]
RESULTS, BENCHMARKS, RECORDS = (
    ROOT / name for name in ("docs/results.md", "benchmarks/README.md", "benchmarks/records/README.md")
)
SPEED = {
    "rejax": (
        "ppo CartPole-v1 64 x 128",
        "ppo CartPole-v1 4 x 128, 64 seeds",
        "ppo CartPole-v1 4 x 128, 4 learning rates",
        "ppo Breakout-MinAtar 64 x 128",
        "dqn CartPole-v1 128 x 1, 8 x 256",
        "sac Pendulum-v1 16 x 1, 2 x 128",
        "td3 Pendulum-v1 16 x 1, 2 x 128",
    ),
    "purejaxrl": ("ppo CartPole-v1 4 x 128", "recurrent_ppo CartPole-v1 64 x 128"),
    "jaxmarl": (
        "ippo jaxmarl:MPE_simple_spread_v3:num_agents=3 128 x 25",
        "mappo gru jaxmarl:MPE_simple_spread_v3:num_agents=3 128 x 25",
        "vdn gru jaxmarl:MPE_simple_spread_v3:num_agents=32 128 x 26, 1 x 32",
        "qmix gru jaxmarl:MPE_simple_spread_v3:num_agents=32 128 x 26, 1 x 32",
    ),
    "pgx": ("alphazero pgx:connect_four 128 x 16, 8 x 256",),
}
"""The rows of `results.md` by the table that they are from; one for each algorithm, the best and the worst."""
RECIPES = (
    "dqn-spaceinvaders",
    "es-cartpole",
    "impala-spaceinvaders",
    "mappo-spread",
    "muzero-cartpole",
    "ppo-cartpole",
    "ppo-breakout",
    "ppo-craftax",
    "ppo-halfcheetah",
    "ppo-hopper",
    "ppo_rnd-doorkey",
    "pqn-breakout",
    "qmix-spread",
    "r2d2-cartpole",
    "sac-pendulum",
    "td3-pendulum",
)


@functools.cache
def recipes_page() -> str:
    """The page of all recipes, whose links lead to files of the repository."""
    return f"{index(rows(), alone=True)}<!-- written by docs/write_results.py, from the records of recipes -->\n"


def cells(text: str, name: str | None = None) -> list[list[str]]:
    """The rows of the tables in a page with their heads, or of those between the markers of a benchmark."""
    part = text.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0] if name else text
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]


def table(head: str, chosen: list[list[str]]) -> str:
    """A table as Markdown, from its head and its rows."""
    lines = [f"| {' | '.join(row)} |" for row in chosen]
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *lines])


def tables() -> dict[str, str]:
    """The tables of `results.md`, by the names of their markers."""
    text = BENCHMARKS.read_text("utf-8")
    recipes = {row[0].partition("]")[0][1:]: row for row in cells(recipes_page())}
    speed = []
    for peer, labels in SPEED.items():
        head, *found = cells(text, peer)
        speed += [[row[0].replace("jaxmarl:MPE_simple_", ""), head[2], *row[1:4]] for row in found if row[0] in labels]
    ray = [  # the rows of steps per second, without intervals
        [cell.partition(" (")[0] for cell in (*row[:4], row[5])] for row in cells(text, "rllib")[1:] if len(row) == 7
    ]
    gpu = [[*row[:4], row[5], row[8]] for row in cells(text, "gpu")[1:]]
    brax = [[*row[:2], *row[3:]] for row in cells(text, "suite_trainers")[1:]]
    return {
        "peers": table("setting | compared with | msrl_jax | the other | ratio", speed),
        "ray": table("setting | msrl_jax, all in JAX | msrl_jax, Gymnasium | RLlib, Gymnasium | ratio with Gymnasium", ray),
        "h100": table("setting | steps/s | ms per iteration | predicted least | to compile | ratio to Rejax", gpu),
        "brax": table("task | steps | return, msrl_jax | return, Brax's PPO | seconds, msrl_jax | seconds, Brax's PPO", brax),
        "reached": table("recipe | environment | steps | training | best agent", [[n, *recipes[n][1:5]] for n in RECIPES]),
    }


def results_page() -> str:
    """`results.md` with new tables between its markers."""
    text = RESULTS.read_text("utf-8")
    for name, new in tables().items():
        head, rest = text.split(f"<!-- {name}: begin -->")
        text = f"{head}<!-- {name}: begin -->\n\n{new}\n\n<!-- {name}: end -->{rest.split(f'<!-- {name}: end -->')[1]}"
    return text


if __name__ == "__main__":
    RECORDS.write_text(recipes_page(), "utf-8")
    RESULTS.write_text(results_page(), "utf-8")
