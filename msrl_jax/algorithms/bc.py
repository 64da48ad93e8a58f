"""Behavior cloning: maximizes the likelihood of a data set's actions under the policy (Pomerleau, 1991).

Efficient training of artificial neural networks for autonomous navigation, https://doi.org/10.1162/neco.1991.3.1.88
This file has the loss; the loop is in `loops/offline.py`.
"""

from typing import Any

import jax

from msrl_jax.algorithms.agent import Agent
from msrl_jax.algorithms.config import (
    Activation,
    Codec,
    NetworkKind,
    OptimizerKind,
    Tunable,
    TunableOrNone,
    config,
    field,
    tunable,
)
from msrl_jax.algorithms.loops.buffers import check_bounded, check_data
from msrl_jax.algorithms.loops.off_policy import Carry, gradient_rule
from msrl_jax.algorithms.loops.offline import offline_agent, read_data
from msrl_jax.algorithms.networks.distributions import check_policy_space, choose, has_scale
from msrl_jax.algorithms.networks.policies import log_likelihood, make_policy
from msrl_jax.algorithms.optimizers import make_optimizer
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@config("bc", offline=True)
class BC:
    """Behavior cloning; for actions that are discrete, integers or bounded floats."""

    data: str | None = field(default=None, doc="path of the data set, or a `msrl_jax.data.Dataset`; training needs it.")
    num_updates: int = field(default=20, doc="updates per iteration, `K`. Usual: 10 to 100.")
    batch_size: int = field(default=256, doc="transitions per update, `B`. Usual: 32 to 512.")
    storage: Codec | None = field(default=None, doc='codec of observations ("scaled_uint8": over 255). Usual: None, "uint8".')
    shards: int | None = field(default=None, doc="parts of the buffer; None: gcd of `batch_size` and 8. Usual: None.")
    learning_rate: Tunable = tunable(default=0.001, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: TunableOrNone = tunable(default=None, above=0, doc="largest norm of each network's gradients. Usual: None.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (64, 64) to (256, 256).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    validation_fraction: float = field(default=0.1, low=0, below=1, doc="share of episodes held out to validate. Usual: 0.1.")

    check = check_data

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space, a size or the data do not fit."""
        space = check_policy_space(env.action_space)
        policy = make_policy(env.observation_space, check_bounded("bc", space) if has_scale(space) else space, self)
        optimizer = make_optimizer(self, epsilon=1e-8)

        @fragment(role="learner")
        def gradients(params, target_params, batch):
            experience = batch.experience

            def loss(params):
                distribution = policy.apply(params, experience.obs)
                losses = -log_likelihood(distribution, experience.action)
                return losses.mean(), (losses, {"loss": losses.mean(), "entropy": distribution.entropy().mean()})

            return jax.grad(loss, has_aux=True)(params)

        def choose_action(params: Any, obs: jax.Array, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
            return choose(policy.apply(params, obs), key), carry

        rule = gradient_rule(self, optimizer, policy.init, gradients, choose_action, target=None)
        return offline_agent(env, self, rule, read_data(env, self))
