"""Names in the registries of algorithms, environments and policies, for `msrl-jax list`, which imports none, and so no JAX."""

ALGORITHMS = (
    "a2c", "a3c", "apex_dqn", "bc", "cql", "ddpg", "dqn", "es", "impala", "ippo", "iql", "maddpg", "mappo", "ppo", "qmix",
    "r2d2", "recurrent_ppo", "sac", "self_play", "td3", "teams", "vdn",
)  # fmt: skip

ENVIRONMENTS = ("KuhnPoker", "RockPaperScissors")
"""The environments of this package."""

POLICIES = ("Central", "Environments", "GPUOnly", "MultiLearner", "SingleLearnerCoarse", "SingleLearnerFine")
