"""How many words of parameters change in an iteration, and what the codec "delta" saves, over learning rates.

The token agent of `examples/archer.py`, whose actor crosses from its learner to the actors in every iteration.

    python benchmarks/changes.py --json benchmarks/results/changes.json --docs benchmarks/README.md
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from comparison import machine, our_versions, rewrite

from msrl_jax import policies
from msrl_jax.report.provenance import commit
from msrl_jax.run.prepare import make_experiment

RATES = (1e-6, 1e-5, 1e-4, 3e-4)


def measure(algo: str, env: str, field: str, rate: float, iterations: int, **fields: Any) -> dict[str, Any]:
    """Trains with the codec and with all words in bfloat16; what was sent, and whether all bits of the states are equal.

    Args:
      algo: the algorithm.
      env: the environment.
      field: the name of the learning rate.
      rate: its value.
      iterations: how many.
      **fields: other fields of the config.

    Returns:
      The rate, values, their changed share, exchanges, those of all values, bytes relative to all values, and equality.
    """
    experiment = make_experiment(algo, env, **fields | {field: rate})
    programs = [experiment.compile(policies.SingleLearnerCoarse(parameter_codec=codec)) for codec in ("delta", "bfloat16")]
    states = [program.run(experiment.start(program), iterations)[0] for program in programs]
    ends = [[np.asarray(_plain(x)) for x in jax.tree.leaves(state)] for state in states]
    (sent,) = programs[0].sent.values()
    return {
        "rate": rate,
        "words": sent.words,
        "changed": sent.changed / (sent.compared * sent.words),
        "exchanges": sent.exchanges,
        "whole": sent.whole,
        "bytes": sent.nbytes / (2 * sent.words * sent.exchanges),
        "equal": all(np.array_equal(a, b) for a, b in zip(*ends, strict=True)),
    }


def _plain(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def page(record: Mapping[str, Any]) -> str:
    """The table of a record, and what it was measured with."""
    lines = ["| learning rate | changed values | exchanges of all values | bytes relative to all values |", "|---:" * 4 + "|"]
    for row in record["rows"]:
        whole = f"{row['whole']} of {row['exchanges']}"
        lines.append(f"| {row['rate']:g} | {row['changed']:.2%} | {whole} | {row['bytes']:.3f} |")
    first, what = record["rows"][0], record["what"]
    equal = "all bits of" if all(row["equal"] for row in record["rows"]) else "not all bits of"
    about = f"{what} with {first['words']:,} parameters, {first['exchanges']} iterations; {equal} the final states are those of"
    return "\n".join([*lines, "", f'{about} `"bfloat16"`.'])


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, and writes the record and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="examples.archer:ArCHer")
    parser.add_argument("--env", default="examples.twenty_questions:TwentyQuestions")
    parser.add_argument("--field", default="actor_rate", help="the field that is the learning rate")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--config", type=json.loads, default={}, help="other fields, as JSON")
    parser.add_argument("--json", type=Path, required=True, help="write the record here")
    parser.add_argument("--docs", type=Path, help="rewrite the table in this page")
    args = parser.parse_args(argv)
    record: dict[str, Any] = {"machine": machine(), "versions": our_versions(), "commit": commit(), "rows": []}
    record["what"] = f"{args.algo.rpartition(':')[2]} on {args.env.rpartition(':')[2]}"
    if args.iterations < 2:
        parser.error("--iterations: an exchange compares with the one before, so it takes at least 2")
    page_before = args.docs and rewrite(args.docs.read_text(), "changes", "")  # says what is missing before anything runs
    config = {name: tuple(x) if isinstance(x, list) else x for name, x in args.config.items()}
    for rate in args.rates:
        record["rows"].append(measure(args.algo, args.env, args.field, rate, args.iterations, **config))
        print(json.dumps(record["rows"][-1]), flush=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if page_before:
        args.docs.write_text(rewrite(args.docs.read_text(), "changes", page(record)))
    print(page(record))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main()
