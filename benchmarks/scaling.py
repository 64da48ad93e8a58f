"""Weak scaling on paper: what each device receives, reduces and holds, under every policy, for growing numbers of devices.

The devices need not be there: `pip install 'jax[tpu]'` brings the compiler for TPUs, which runs on any machine.

    python benchmarks/scaling.py --devices tpu:v6e:1x1 tpu:v6e:2x2 tpu:v6e:4x4 tpu:v6e:8x8 --out scaling

writes scaling.json and scaling.md. Environments grow with the devices.
"""

import argparse
import json
from pathlib import Path

import jax

from msrl_jax.fragments.plan.topologies import cpus_of
from msrl_jax.training.scaling import format_markdown, plans

POLICIES = (
    *("GPUOnly", "MultiLearner", "SingleLearnerCoarse", "SingleLearnerCoarse:learners={half}"),
    *("SingleLearnerFine:learners={half}", "Environments", "Central", "Central:workers={half},shards={half}"),
)


def main() -> None:
    """Plans every policy for all devices and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", nargs="+", default=["ppo"])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--policy", nargs="+", default=POLICIES)
    parser.add_argument("--devices", nargs="+", required=True)
    parser.add_argument("--envs-per-device", type=int, default=8)
    parser.add_argument("--config", type=json.loads, default={}, help="fields of the config, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if cpus := max(map(cpus_of, args.devices)):
        jax.config.update("jax_num_cpu_devices", cpus)
    rows, refused = [], []
    for algo in args.algo:
        for policy in args.policy:
            for devices in args.devices:
                try:
                    rows += plans(algo, args.env, policy, [devices], args.envs_per_device, **args.config)
                except ValueError as error:
                    refused.append({"algorithm": algo, "policy": policy, "devices": devices, "why": str(error)})
                    print(f"{algo}, {policy} on {devices}: {error}", flush=True)
                    continue
                print(format_markdown(rows[-1:]).splitlines()[-1], flush=True)
    found = {"rows": [row.to_dict() for row in rows], "refused": refused}
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(format_markdown(rows) + "\n")


if __name__ == "__main__":
    main()
