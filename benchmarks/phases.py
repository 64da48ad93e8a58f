"""Where the time of training goes, by phase: a table in Markdown, and a figure with `--svg FILE`.

Without other arguments, the comparisons of RL-Scope (arXiv 2102.04285) that need no GPU: algorithms on Walker2d, as in its
figure 5, PPO over simulators, as in figure 7, and programs of JAX. `python benchmarks/phases.py ppo CartPole-v1 GPUOnly`
profiles one setting, and further triples further ones.
"""

import argparse
import re
from pathlib import Path

import jax

import msrl_jax as msrl
from msrl_jax.report import profiles_figure
from msrl_jax.report.curves import svg_of

SETTINGS = [
    *((algo, "gymnasium:Walker2d-v5", "MultiLearner:num_devices=1") for algo in ("ppo", "a2c", "ddpg", "sac")),
    *(("ppo", f"gymnasium:{name}-v5", "MultiLearner:num_devices=1") for name in ("HalfCheetah", "Hopper", "Ant")),
    ("ppo", "gymnasium:HalfCheetah-v5", "SingleLearnerFine"),
    ("ppo", "CartPole-v1", "GPUOnly:num_devices=1"),
    ("ppo", "CartPole-v1", "SingleLearnerFine"),
    ("dqn", "CartPole-v1", "GPUOnly:num_devices=1"),
    ("sac", "Pendulum-v1", "GPUOnly:num_devices=1"),
]
PHASES = ("simulation", "inference", "learning", "replay", "transfer", "Python", "idle")


def main() -> None:
    """Profiles the settings one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="algorithm, environment and policy, three words each")
    parser.add_argument("--svg", type=Path, help="a file for the figure")
    parser.add_argument("--repeats", type=int, default=5, help="number of calibrating and of counted measurements")
    args = parser.parse_args()
    if len(args.settings) % 3:
        parser.error("pass an algorithm, an environment and a policy for each setting")
    words = args.settings
    settings = [tuple(words[i : i + 3]) for i in range(0, len(words), 3)] or SETTINGS
    jax.config.update("jax_num_cpu_devices", 2)
    print(f"| setting | an iteration | {' | '.join(PHASES)} | rest | tracing took | error |")
    print("|---|" + "---:|" * (len(PHASES) + 4))
    found = {}
    for algo, env, policy in settings:
        made = msrl.profile(algo, env, policy=policy, repeats=args.repeats)
        name = f"{algo}, {env.rpartition(':')[2]}, {re.sub('[:(].*', '', policy)}"
        found[name] = made
        shares = made.shares
        cells = [f"{shares.get(phase, 0):.1%}" for phase in PHASES]
        rest = f"{1 - sum(shares.get(phase, 0) for phase in PHASES):.1%}"
        row = [name, f"{made.seconds * 1e3:,.4g} ms", *cells, rest, f"{made.overhead:.0%}", f"{made.error:+.1%}"]
        print(f"| {' | '.join(row)} |", flush=True)
    if args.svg is not None:
        args.svg.write_text(svg_of(profiles_figure(found)))


if __name__ == "__main__":
    main()
