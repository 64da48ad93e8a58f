"""Offline selection of policies (RL Unplugged, Gulcehre et al., 2020, arXiv 2006.13888): which of eight is best, by data alone?

    python examples/offline_selection.py --svg docs/example_offline_selection.svg

Eight policies are the same run after more and more steps. Data are recorded from the first with random actions, from one that
is half trained, and from the best. Fitted Q evaluation ranks the policies by each data set; playing says how right that is.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import msrl_jax as msrl
from msrl_jax.experiment import FittedQ
from msrl_jax.report import curves

NUM_POLICIES = 8
EPISODES = 128  # that say how good a policy is


@dataclasses.dataclass(frozen=True)
class Task:
    """An environment, and the algorithm that makes its policies.

    Attributes:
      algorithm: name of the algorithm.
      steps: environment steps between two policies.
      options: fields of its config.
      discount: discount factor of fitted Q evaluation.
    """

    algorithm: str
    steps: int
    options: dict[str, Any]
    discount: float = 0.99


TASKS = {
    "CartPole-v1": Task("dqn", 5_120, {}),
    "Acrobot-v1": Task("dqn", 5_120, {}),
    "Pendulum-v1": Task("sac", 1_600, {"hidden_sizes": (64, 64)}),
}
EPSILON = {"random": 1.0, "medium": 0.3, "expert": 0.1}
"""The share of random actions in each data set."""


def make_policies(env: str, task: Task, seed: int, number: int = NUM_POLICIES) -> list[msrl.Result]:
    """One run, as it is after each of `number` parts."""
    with tempfile.TemporaryDirectory() as folder:
        run = msrl.train(
            task.algorithm, env, total_steps=number * task.steps, seed=seed, out=f"{folder}/run", checkpoint_every=task.steps,
            keep_checkpoints=number, eval_episodes=0, progress=False, **task.options,
        )  # fmt: skip
        iterations = task.steps // run.experiment.steps_per_iteration
        return [msrl.Result.load(f"{folder}/run", checkpoint=part * iterations) for part in range(1, number + 1)]


def true_returns(policies: Sequence[msrl.Result]) -> np.ndarray:
    """The mean returns of played episodes."""
    return np.array([float(np.mean(policy.evaluate(EPISODES, seed=1).returns)) for policy in policies])


def make_data(policies: Sequence[msrl.Result], returns: np.ndarray, rows: int, seed: int) -> dict[str, msrl.data.Dataset]:
    """Random, medium and expert data: of the first policy, of the one nearest to half of the best, and of the best."""
    half = (returns.min() + returns.max()) / 2
    sources = {"random": 0, "medium": int(np.argmin(abs(returns - half))), "expert": int(np.argmax(returns))}
    return {
        name: msrl.data.record(policies[source], rows, epsilon=EPSILON[name], seed=seed) for name, source in sources.items()
    }


def ranked(policies: Sequence[msrl.Result], returns: np.ndarray, data: Any, settings: FittedQ, **where: Any) -> dict[str, Any]:
    """The estimates of all policies by one data set, their rank correlation with the returns, and what the first one earns."""
    estimates = [policy.evaluate(data=data, settings=settings, **where) for policy in policies]
    values = np.array([e.value for e in estimates])
    return {
        "estimates": values.tolist(),
        "intervals": [e.interval for e in estimates],
        "spearman": float(stats.spearmanr(values, returns).statistic),
        "selected": float(returns[np.argmax(values)]),
    }


def study(env: str, seed: int, settings: FittedQ | None = None, *, rows: int = 10_000, **where: Any) -> dict[str, Any]:
    """Ranks the policies of one run by each data set."""
    task = TASKS[env]
    policies = make_policies(env, task, seed)
    returns = true_returns(policies)
    settings = settings or FittedQ(discount=task.discount)
    data = make_data(policies, returns, rows, seed)
    found = {name: ranked(policies, returns, each, settings, **where) for name, each in data.items()}
    return {"env": env, "seed": seed, "returns": returns.tolist(), "data": found}


def figure(studies: Sequence[dict[str, Any]]) -> str:
    """Draws returns over estimates, a panel for each environment, a colour for each data set."""
    names = list(dict.fromkeys(each["env"] for each in studies))
    with curves.styled():
        drawn, panels = curves.figure_of(len(names))
        for panel, env in zip(panels, names, strict=True):
            of_env = [each for each in studies if each["env"] == env]
            for number, kind in enumerate(EPSILON):
                estimates = np.concatenate([each["data"][kind]["estimates"] for each in of_env])
                returns = np.concatenate([each["returns"] for each in of_env])
                mean = np.mean([each["data"][kind]["spearman"] for each in of_env])
                label = f"{kind} data: rank correlation {mean:.2f}"
                panel.scatter(estimates, returns, s=12, color=f"C{number}", label=label)
            panel.set(title=env, xlabel="estimated discounted return", ylabel="mean return")
        return curves.svg_of(curves.finished(drawn))


def main(arguments: Sequence[str] | None = None) -> None:
    """Studies environments and seeds, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the runs")
    parser.add_argument("--policy", default="GPUOnly", help="distribution policy of the fits")
    parser.add_argument("--svg", type=Path, help="file for a figure")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args(arguments)
    studies = []
    for env in args.envs:
        for seed in args.seeds:
            studies.append(study(env, seed, policy=args.policy))
            found = studies[-1]
            print(env, "seed", seed, "returns", *np.round(found["returns"], 1), flush=True)
            for kind, each in found["data"].items():
                first = f"the first earns {each['selected']:.1f} of {max(found['returns']):.1f}"
                print(f"  {kind} data: rank correlation {each['spearman']:.2f}, {first}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(studies))
    if args.svg:
        args.svg.write_text(figure(studies))


if __name__ == "__main__":
    main()
