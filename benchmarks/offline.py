"""Learning from data alone: which algorithm wins on which data, and whether data can tell good policies from bad ones.

    python benchmarks/offline.py --json benchmarks/results/offline.json --docs benchmarks/README.md --svg docs/offline.svg

PPO trains on each environment. Three data sets are recorded: of uniformly random actions, of the agent half way from
random to the best return, and of the best agent. Five algorithms learn from each of them. Then fitted Q evaluation orders eight
policies by each of the data sets, and the order is compared with what the policies earn (the split of RL Unplugged, 2006.13888,
between selecting online and offline).
"""

import argparse
import bisect
import dataclasses
import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from comparison import machine, our_versions, rewrite
from scipy import stats

import msrl_jax as msrl
from msrl_jax.cli import argument_types
from msrl_jax.envs import Discrete
from msrl_jax.offline_evaluation import FittedQ, estimate_return
from msrl_jax.report import curves, recipe
from msrl_jax.report.provenance import commit
from msrl_jax.report.statistics import Estimate, estimate, mean

ENVS = {"CartPole-v1": "ppo-cartpole", "Acrobot-v1": "ppo-acrobot", "Pendulum-v1": "ppo-pendulum"}  # -> recipe of PPO
DATA = ("random", "medium", "expert")
AWAC = {"critic": "of_policy"}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "bc": ("bc", {}),
    "cql": ("cql", {}),
    "iql": ("iql", {}),
    "crr": ("iql", AWAC | {"critic": "of_policy:4", "weighting": "binary"}),
    "awac": ("iql", AWAC),
}
TARGETS = (0, 33, 67, 100)  # scores near which policies are chosen, one of the online run and one of the offline runs each


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How long everything runs."""

    num_envs: int = 8  # of the online run
    iterations: int = 60  # of the online run, each of which ends with an evaluation and a checkpoint
    rows: int = 30_000
    lanes: int = 10  # environments that a data set is recorded in
    updates: int = 3_000
    batch_size: int = 64
    seeds: int = 5
    episodes: int = 50
    num_fits: int = 3  # critics of fitted Q evaluation
    fit_updates: int = 2_000
    fit_batch_size: int = 128

    @property
    def fitted_q(self) -> FittedQ:
        """The settings of fitted Q evaluation; without normalized layers, estimates diverged on seed 10,000."""
        batch_size = self.fit_batch_size
        return FittedQ(num_updates=self.fit_updates, fits=self.num_fits, batch_size=batch_size, layer_norm=True)


TINY = Sizes(2, 4, 3_000, 2, 20, 16, 2, 4, 2, 20, 16)


def normalized(returns: Any, random: float, expert: float) -> np.ndarray:
    """The scores of returns, as D4RL has them (2004.07219): 0 for random actions, 100 for the expert."""
    return 100 * (np.asarray(returns, np.float64) - random) / (expert - random)


def nearest(scores: Sequence[float], targets: Sequence[float]) -> list[int]:
    """For each target, the number of the score that is nearest to it, of those that no earlier target has."""
    found: list[int] = []
    for target in targets:
        free = [i for i in range(len(scores)) if i not in found]
        found.append(min(free, key=lambda i: abs(scores[i] - target)))
    return found


def trained(env: str, seed: int, sizes: Sizes, folder: Path) -> msrl.Result:
    """The online run, with an evaluation and a checkpoint after each iteration."""
    config = dataclasses.replace(recipe(ENVS[env]).algorithm, num_envs=sizes.num_envs)
    every = config.num_envs * config.unroll_length
    return msrl.train(
        config,
        env,
        total_steps=sizes.iterations * every,
        seed=seed,
        eval_episodes=sizes.episodes,
        eval_every=every,
        checkpoint_every=every,
        keep_checkpoints=sizes.iterations,
        out=folder,
        chunk=1,
        progress=False,
    )


def behaviour(agent: msrl.Result | None, obs: np.ndarray, actions: int) -> np.ndarray:
    """The probabilities `[N, actions]` with which data were made: of a sampled agent, or uniform without one."""
    return np.full((len(obs), actions), 1 / actions) if agent is None else np.asarray(agent.probabilities(obs))


def offline_runs(env: str, data: dict[str, msrl.data.Dataset], seed: int, sizes: Sizes) -> dict[tuple[str, str], msrl.Result]:
    """The runs of all algorithms on all data sets, all seeds of one in one program: (algorithm, data set) -> run."""
    runs = {}
    for (name, (algo, options)), kind in ((x, kind) for x in ALGORITHMS.items() for kind in DATA):
        config = options | {"batch_size": sizes.batch_size, "data": data[kind]}
        began = time.perf_counter()
        runs[name, kind] = msrl.train(
            algo,
            env,
            total_steps=sizes.updates,
            seed=seed,
            seeds=sizes.seeds,
            eval_episodes=sizes.episodes,
            progress=False,
            **config,
        )
        seconds = time.perf_counter() - began
        print(f"{env}, {name} of {kind} data: {_returns(runs[name, kind]).mean():.1f}, {seconds:.0f} s", flush=True)
    return runs


def selection(policies: list[tuple[str, msrl.Result]], makers: dict[str, Any], data: Any, sizes: Sizes) -> dict[str, Any]:
    """What policies earn, and what each data set says that they would earn.

    Args:
      policies: name and run of each; the run's first member acts.
      makers: data set -> the agent that made it, None for random actions.
      data: data set -> its rows.
      sizes: how long everything runs.

    Returns:
      The true returns, and for each data set the estimates, their relative change in the last tenth of the fits, and the mean
      probability with which the data's maker does what the policy would do (None where actions are continuous).
    """
    space = policies[0][1].behavior.env.action_space
    found: dict[str, Any] = {"names": [name for name, _ in policies], "estimates": {}, "changes": {}, "covered": {}}
    found["returns"] = [float(run.evaluate(2 * sizes.episodes, seed=1, member=0).returns.mean()) for _, run in policies]
    for kind, dataset in data.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the estimate .* still changed")  # the record has the change
            fitted = [estimate_return(run, dataset, sizes.fitted_q, member=0) for _, run in policies]
        found["estimates"][kind] = [x.value for x in fitted]
        found["changes"][kind] = [abs(x.change / x.value) for x in fitted]
        found["covered"][kind] = None
        if isinstance(space, Discrete):
            made = behaviour(makers[kind], dataset.obs, space.n)
            actions = [np.asarray(run.act(jnp.asarray(dataset.obs), member=0)) for _, run in policies]
            found["covered"][kind] = [float(made[np.arange(len(made)), x].mean()) for x in actions]
        print(kind, np.round(found["returns"], 1), np.round(found["estimates"][kind], 2), flush=True)
    return found


def measure(env: str, seed: int, sizes: Sizes) -> dict[str, Any]:
    """All of one environment: the data, the scores of the algorithms, and the order of eight policies."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        online = trained(env, seed, sizes, Path(folder, "online"))
        returns = online.history["eval_return"]
        dice = msrl.data.record(online, sizes.rows, epsilon=1.0, seed=seed, num_envs=sizes.lanes)
        random, expert = _data_return(dice), float(returns.max())
        scores = normalized(returns, random, expert)

        def agent(number: int) -> msrl.Result:
            return msrl.Result.load(Path(folder, "online"), checkpoint=number + 1)

        def played(number: int) -> float:
            return _data_return(msrl.data.record(agent(number), sizes.rows // 3, seed=seed + 1, num_envs=sizes.lanes))

        best = int(scores.argmax())
        half_way = bisect.bisect_left(range(best), (random + expert) / 2, key=played)
        makers = {"random": None, "medium": agent(half_way), "expert": agent(best)}
        data = {"random": dice}
        for kind in ("medium", "expert"):
            data[kind] = msrl.data.record(makers[kind], sizes.rows, seed=seed, num_envs=sizes.lanes)
            print(f"{env}, {kind} data: {_data_return(data[kind]):.1f}", flush=True)
        runs = offline_runs(env, data, seed, sizes)
        offline = {name: float(normalized(_returns(run)[0], random, expert)) for name, run in runs.items()}
        policies = [(f"ppo, iteration {i + 1}", agent(i)) for i in nearest(list(scores), TARGETS)]
        names = list(runs)
        policies += [(" of ".join(names[i]), runs[names[i]]) for i in nearest(list(offline.values()), TARGETS)]
        chosen = selection(policies, makers, data, sizes)
    return {
        "random": random,
        "expert": expert,
        "online_returns": returns.tolist(),
        "data": {kind: {"rows": len(x), "return": _data_return(x)} for kind, x in data.items()},
        "returns": {kind: {name: _returns(runs[name, kind]).tolist() for name in ALGORITHMS} for kind in DATA},
        "selection": chosen | judged(chosen, random, expert),
        "seconds": time.perf_counter() - began,
    }


def _returns(run: msrl.Result) -> np.ndarray:
    """The mean return of each seed's last evaluation, `[S]`."""
    assert run.evaluation is not None
    return run.evaluation.returns.mean(-1)


def _data_return(dataset: msrl.data.Dataset) -> float:
    """The mean return of the episodes that ended."""
    episodes = dataset.episodes
    cut = dataset.cut[episodes.start + episodes.length - 1]
    return float(episodes.returns[~cut].mean())


def judged(found: dict[str, Any], random: float, expert: float) -> dict[str, Any]:
    """The rank correlation of estimates with returns, and by how much the one with the best estimate scores less."""
    scores = normalized(found["returns"], random, expert)
    correlation = {kind: float(stats.spearmanr(x, found["returns"])[0]) for kind, x in found["estimates"].items()}  # type: ignore
    regret = {kind: float(scores.max() - scores[int(np.argmax(x))]) for kind, x in found["estimates"].items()}
    return {"scores": scores.tolist(), "spearman": correlation, "regret": regret}


def winners(estimates: dict[str, Estimate]) -> list[str]:
    """The algorithms whose intervals overlap with that of the best mean, itself first; a winner is alone."""
    best = max(estimates, key=lambda name: estimates[name].value)
    return [best, *(name for name, x in estimates.items() if name != best and x.high >= estimates[best].low)]


def score_estimates(row: dict[str, Any], kind: str) -> dict[str, Estimate]:
    """The mean scores of the algorithms on a data set, over seeds, with 95% intervals."""
    scores = {name: normalized(x, row["random"], row["expert"]) for name, x in row["returns"][kind].items()}
    return {name: estimate([x], mean) for name, x in scores.items()}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(record: dict[str, Any]) -> str:
    """The tables of a record, and a paragraph on what it is of."""
    head = ("environment", "data", "its score", *ALGORITHMS, "best")
    lines = [_line(head), "|---" * len(head) + "|"]
    for env, row in record["environments"].items():
        for kind in DATA:
            found = score_estimates(row, kind)
            own = float(normalized(row["data"][kind]["return"], row["random"], row["expert"]))
            ahead = winners(found)
            verdict = f"**{ahead[0]}**" if len(ahead) == 1 else f"tie: {', '.join(ahead)}"
            lines.append(_line([env, kind, str(round(own)), *map(str, found.values()), verdict]))
    head = ("environment", "data", "Spearman", "regret", "still changing", "covered: worst, best")
    lines += ["", _line(head), "|---" * len(head) + "|"]
    for env, row in record["environments"].items():
        chosen = row["selection"]
        worst, best = int(np.argmin(chosen["returns"])), int(np.argmax(chosen["returns"]))
        for kind in DATA:
            moving = sum(x > 0.05 for x in chosen["changes"][kind])
            covered = chosen["covered"][kind]
            cells = f"{chosen['spearman'][kind]:.2f}", str(round(chosen["regret"][kind])), f"{moving} of {len(chosen['names'])}"
            lines.append(_line([env, kind, *cells, "-" if covered is None else f"{covered[worst]:.2f}, {covered[best]:.2f}"]))
    lines += ["", _line(("environment", "random", "expert", "scores of the eight policies")), "|---" * 4 + "|"]
    for env, row in record["environments"].items():
        each = zip(row["selection"]["names"], row["selection"]["scores"], strict=True)
        policies = "; ".join(f"{name}: {round(score)}" for name, score in each)
        lines.append(_line([env, f"{row['random']:.1f}", f"{row['expert']:.1f}", policies]))
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    seconds = sum(row["seconds"] for row in record["environments"].values())
    about = record["machine"]
    return "\n".join([*lines, "", f"{seconds / 60:.0f} minutes on {about['cpu']} (cores: {about['cores']}). {versions}."])


def figure(record: dict[str, Any]) -> str:
    """Two panels: scores of the algorithms on all data sets, and correlations of estimates with returns."""
    labels = [f"{env.partition('-')[0]}\n{kind}" for env in record["environments"] for kind in DATA]
    rows = [(row, kind) for row in record["environments"].values() for kind in DATA]
    with curves.styled():
        drawn, (upper, lower) = curves.figure_of(2)
        drawn.set_size_inches(8, 6)
        for number, name in enumerate(ALGORITHMS):
            found = [score_estimates(row, kind)[name] for row, kind in rows]
            middle, x = np.array([e.value for e in found]), np.arange(len(rows)) + 0.12 * (number - 2)
            errors = np.abs([[e.value - e.low for e in found], [e.high - e.value for e in found]])
            upper.errorbar(x, middle, errors, fmt="o", ms=4, lw=1.2, color=f"C{number}", label=name)
        upper.set(ylabel="normalized score", xticks=range(len(rows)), xticklabels=labels)
        lower.bar(range(len(rows)), [row["selection"]["spearman"][kind] for row, kind in rows], 0.5, label="Spearman")
        lower.axhline(0.7, color="0.5", ls=":", label="0.7")
        lower.set(ylabel="estimates against returns", ylim=(-1, 1), xticks=range(len(rows)), xticklabels=labels)
        return curves.svg_of(curves.finished(drawn))


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, prints, and writes the record, the page and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*ENVS], default=[*ENVS], help="measure these; keep others of the record")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to try the command out")
    parser.add_argument(
        "--json", type=argument_types.new_file, required=True, help="write the record here, after every environment"
    )
    parser.add_argument("--docs", type=Path, help="rewrite the tables in this page")
    parser.add_argument("--svg", type=argument_types.new_file, help="draw the figure here")
    args = parser.parse_args(argv)
    sizes = TINY if args.tiny else Sizes()
    old = json.loads(args.json.read_text())["environments"] if args.json.exists() else {}
    record: dict[str, Any] = {"machine": machine(), "versions": our_versions(), "commit": commit(), "seed": args.seed}
    record |= {"sizes": dataclasses.asdict(sizes)}
    for env in args.only:
        old[env] = measure(env, args.seed, sizes)
        record["environments"] = {name: old[name] for name in ENVS if name in old}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.docs:
        args.docs.write_text(rewrite(args.docs.read_text(), "offline", page(record)))
    if args.svg:
        args.svg.write_text(figure(record))
    print(page(record))


if __name__ == "__main__":
    main()
