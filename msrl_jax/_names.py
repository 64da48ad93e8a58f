"""The names in the registries of algorithms and policies, for `msrl-jax list`, which imports neither and so no JAX."""

ALGORITHMS = (
    "a2c", "a3c", "apex_dqn", "bc", "cql", "ddpg", "dqn", "es", "impala", "ippo", "iql", "mappo", "ppo", "r2d2",
    "recurrent_ppo", "sac", "td3",
)  # fmt: skip

POLICIES = ("Central", "Environments", "GPUOnly", "MultiLearner", "SingleLearnerCoarse", "SingleLearnerFine")
