"""Small runs in which something becomes nan or infinite."""

import jax
import jax.numpy as jnp

import msrl_jax as msrl

SMALL = {"num_envs": 4, "unroll_length": 8, "hidden_sizes": (8,)}
CONFIGS = {
    "ppo": SMALL | {"num_epochs": 1, "num_minibatches": 2},
    "dqn": SMALL | {"batch_size": 8, "replay.capacity": 256, "replay.learning_starts": 32, "num_updates": 2},
    "sac": SMALL | {"batch_size": 8, "replay.capacity": 256, "replay.learning_starts": 32, "num_updates": 2},
    "es": {"num_envs": 4, "unroll_length": 24, "hidden_sizes": (8,)},
    "impala": SMALL,
}
# Step 20 is step 4 of the third unroll of 8 steps, or step 20 of the first one of 24.
WHERE = {"ppo": (3, (3, 8)), "dqn": (3, (3, 8)), "sac": (3, (3, 8)), "es": (1, (19, 24))}
APART = "SingleLearnerCoarse:actors=1,learners=1"
TOGETHER = "GPUOnly:num_devices=1"


def run(algo, env, policy=TOGETHER, guard="halt", iterations=6, **settings):
    config = CONFIGS[algo] | settings
    steps = iterations * config["num_envs"] * config["unroll_length"]
    return msrl.train(
        algo,
        env,
        policy=policy,
        total_steps=steps,
        chunk=2,
        eval_episodes=0,
        guard=guard,
        progress=False,
        devices=jax.devices()[:2],
        **config,
    )


def all_finite(tree):
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact))
