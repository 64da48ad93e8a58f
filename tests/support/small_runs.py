"""Small configs and environments of every algorithm, and a measure of how far two runs are apart."""

import numpy as np

from msrl_jax.networks.custom_network import CustomNetworks
from msrl_jax.networks.modules import as_network
from tests.support import transformations
from tests.support.modules import FORMS, Fading, Head

SMALL = {"num_envs": 64, "unroll_length": 8, "hidden_sizes": (16, 16)}

PARTICULAR = {
    "ppo": {"num_epochs": 2, "num_minibatches": 2},
    "recurrent_ppo": {"num_epochs": 2, "num_minibatches": 2, "core.size": 16},
    "recurrent_ppo+min_gru": {"num_epochs": 2, "num_minibatches": 2, "core": "min_gru:16"},
    "recurrent_ppo+lru": {"num_epochs": 2, "num_minibatches": 2, "core": "lru:16"},
    "recurrent_ppo+gtrxl": {"num_epochs": 2, "num_minibatches": 2, "core": "gtrxl:16,layers=1,heads=2,context=4"},
    "recurrent_ppo+own": {"num_epochs": 2, "num_minibatches": 2, "core": Fading()},
    "a3c": {"num_workers": 8},
    "es": {"unroll_length": 24},
    "impala+replay": {"replay_batches": 4, "num_updates": 2},
    "pqn": {"num_epochs": 2, "num_minibatches": 2},
    "dqn": {"replay.learning_starts": 512, "batch_size": 64, "num_updates": 2, "replay.capacity": 4096},
    # New networks value both actions nearly alike: few examples and fast steps, lest rounding decide which is the greedy one.
    "dqn+c51": {
        "replay.learning_starts": 512,
        "batch_size": 16,
        "num_updates": 2,
        "replay.capacity": 4096,
        "returns": "c51",
        "learning_rate": 1e-3,
    },
    "dqn+qr": {"replay.learning_starts": 512, "batch_size": 64, "num_updates": 2, "replay.capacity": 4096, "returns": "qr"},
    # Targets average over actions: which of two nearly equal values is the larger one decides nothing but an action.
    "dqn+munchausen": {
        "replay.learning_starts": 512,
        "batch_size": 64,
        "num_updates": 2,
        "replay.capacity": 4096,
        "target": "munchausen",
    },
    "dqn+iqn": {
        "replay.learning_starts": 512,
        "batch_size": 16,
        "num_updates": 2,
        "replay.capacity": 4096,
        "returns": "iqn:num_fractions=4,num_choice_fractions=8",
        "learning_rate": 1e-3,
    },
    "apex_dqn": {"replay.learning_starts": 512, "batch_size": 64, "num_updates": 2, "replay.capacity": 4096},
    "r2d2": {
        "replay.learning_starts": 512,
        "batch_size": 64,
        "num_updates": 2,
        "replay.capacity": 4096,
        "core.size": 16,
        "burn_in": 2,
        "trace_length": 4,
        "replay.n_step": 3,
        "exploration": "per_env",
        "learning_rate": 2.5e-4,
    },
    # Searches compare values that are nearly equal in a new network: few examples and steps, lest rounding decide.
    "muzero": {
        "replay.learning_starts": 512,
        "batch_size": 16,
        "num_updates": 2,
        "replay.capacity": 4096,
        "latent_size": 16,
        "num_simulations": 4,
        "model_steps": 2,
        "replay.n_step": 3,
    },
    "sac": {"num_updates": 2, "batch_size": 64, "replay.capacity": 4096, "replay.learning_starts": 512},
    "td3": {"num_updates": 2, "batch_size": 64, "replay.capacity": 4096, "replay.learning_starts": 512},
    "ddpg": {"num_updates": 2, "batch_size": 64, "replay.capacity": 4096, "replay.learning_starts": 512},
    "bc": {"num_updates": 2, "batch_size": 64},
    "cql": {"num_updates": 2, "batch_size": 64, "num_samples": 2},
    "cql+lagrange": {"num_updates": 2, "batch_size": 64, "num_samples": 2, "target_gap": 0.5},
    "iql": {"num_updates": 2, "batch_size": 64},
    "iql+awac": {"num_updates": 2, "batch_size": 64, "critic": "of_policy"},
    "iql+crr": {"num_updates": 2, "batch_size": 64, "critic": "of_policy:4", "weighting": "binary"},
}
CRITICS = {
    "sac+qr": {"returns": "tqc:5,1", "num_critics": 3, "normalize_observations": True},
    "td3+c51": {"returns": "c51:-50.0,0.0,11", "max_exploration_noise": 0.4},
    "sac+cross_q": {"target": "cross_q", "tau": 0.01},
}
for _name, _options in CRITICS.items():
    PARTICULAR[_name] = PARTICULAR[_name.partition("+")[0]] | _options
for _name in ("ppo", "impala"):
    PARTICULAR[f"{_name}_rnd"] = PARTICULAR.get(_name, {})
PARTICULAR["a2c+memory"] = PARTICULAR["a2c_rnd"] = {"core": "lstm:16"}
PARTICULAR["ppo_rnd+memory"] = PARTICULAR["ppo"] | {"core": "gru:16"}
PARTICULAR["a3c+memory"] = PARTICULAR["a3c"] | {"core": "min_gru:16"}
PARTICULAR["impala+memory"] = PARTICULAR["impala+replay"] | {"core": "gru:16"}
PARTICULAR["pqn+memory"] = PARTICULAR["pqn"] | {"core": "gru:16"}
PARTICULAR["a2c+privileged"] = {"core": "gru:16"}
PARTICULAR["r2d2+lru"] = PARTICULAR["r2d2"] | {"core": "lru"}
_WINDOWS = {"core.size": 16, "burn_in": 2, "trace_length": 4}
PARTICULAR["sac+gru"] = PARTICULAR["sac"] | _WINDOWS | {"core": "gru", "normalize_observations": True}
PARTICULAR["td3+lru"] = PARTICULAR["td3"] | _WINDOWS | {"core": "lru", "replay.n_step": 2}
for _name in ("ppo", "recurrent_ppo", "sac"):
    PARTICULAR[f"{_name}+privileged"] = PARTICULAR[_name]
# Modules of one's own.
MODULES = {"ppo+linen": "linen", "dqn+equinox": "equinox", "sac+nnx": "nnx", "r2d2+equinox": "equinox", "a2c+pair": "pair"}
for _name, _form in MODULES.items():
    PARTICULAR[_name] = PARTICULAR.get(_name.partition("+")[0], {}) | {"network": as_network(FORMS[_form])}
WHOLE = {"ppo+whole": CustomNetworks(Head(2), Head(1)), "sac+whole": CustomNetworks(Head(2), Head(1))}
for _name, _whole in WHOLE.items():
    PARTICULAR[_name] = PARTICULAR[_name.partition("+")[0]] | {"network": as_network(_whole)}
# Optimizers and schedules. Each step of Muon's iteration for small singular values multiplies a rounding by 3.4.
OPTIMIZED = {
    "ppo+muon": {"optimizer": "muon:ns_steps=1", "learning_rate": 1e-3},
    "dqn+own": {"optimizer": transformations.falling},
    "ppo+kl": {"learning_rate": "kl:1e-4,start=1e-3"},
    "sac+cosine": {"learning_rate": "cosine:1e-3:1e-4,warmup=0.01", "tau": "linear:0.1:0.001", "optimizer": "adamw"},
    "dqn+scheduled": {"exploration.final": "cosine:0.8:0.1", "learning_rate": "linear:1e-3", "exploration.steps": 600},
}
for _name, _options in OPTIMIZED.items():
    PARTICULAR[_name] = PARTICULAR[_name.partition("+")[0]] | _options
PARTICULAR["sac+goals"] = PARTICULAR["sac"] | {"hindsight": "hindsight:0.8", "replay.n_step": 2}
# A pendulum near its upper equilibrium multiplies a deviation by 1.2 at every step: short episodes bound what becomes of it.
ENVS = {"Pendulum-v1": {"max_steps_in_episode": 15}, "PointMaze": {"max_steps": 10}}


def relative_difference(a, b):
    """Largest deviation of a tensor, relative to its norm per element, or to 0.01 if this is larger.

    Biases begin at 0. Adam divides their gradients by 1e-5 or a little more, so it turns a rounding of 1e-9 into a difference
    of 3e-8 after one update with a learning rate of 3e-4; an update changes them by 3e-4.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / max(np.sqrt((b**2).mean()), 1e-2)
