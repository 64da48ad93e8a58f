"""Behavior cloning: maximizes the likelihood of a data set's actions under the policy (Pomerleau, 1991).

Efficient training of artificial neural networks for autonomous navigation, https://doi.org/10.1162/neco.1991.3.1.88
"""

from typing import Any

import jax
import optax

from msrl_jax.agents.action_spaces import check_bounded
from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.configs.config import (
    Activation,
    CodecName,
    NetworkKind,
    OptimizerKind,
    Tunable,
    TunableOrNone,
    config,
    field,
    tunable,
)
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.spaces import is_continuous, zeros
from msrl_jax.fragments import fragment
from msrl_jax.loops.data_field import check_data
from msrl_jax.loops.offline import OfflineState, check_has_data, draw, learn_from, playing_env, read_data, state_axes
from msrl_jax.networks.continuous_policies import heads_of, log_likelihood
from msrl_jax.networks.distributions import choose
from msrl_jax.networks.policy_heads import check_policy_space


@config("bc", offline=True, actions=("discrete", "integers", "bounded"))
class BC:
    """Behavior cloning; for actions that are discrete, integers or bounded floats."""

    data: str | None = field(default=None, doc="path of the data set, or a `msrl_jax.data.Dataset`; training needs it.")
    num_updates: int = field(default=20, doc="updates per iteration, `K`. Usual: 10 to 100.")
    batch_size: int = field(default=256, doc="transitions per update, `B`. Usual: 32 to 512.")
    storage: CodecName | None = field(
        default=None, doc='codec of observations ("scaled_uint8": x / 255). Usual: None, "uint8".'
    )
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
        space = check_bounded(type(self).__name__, space) if is_continuous(space) else space
        policy = heads_of(space).policy(env.observation_space, space, self)
        source, venv = read_data(env, self), playing_env(env, self.batch_size, self.shards)
        optimizer = make_optimizer(self, epsilon=1e-8)
        to_env_action = action_transform(venv.action_space)

        @fragment(role="learner")
        def gradients(params, batch):
            def loss(params):
                distribution = policy.apply(params, batch.obs)
                total = -log_likelihood(distribution, batch.action).mean()
                return total, {"loss": total, "entropy": distribution.entropy().mean()}

            return jax.grad(loss, has_aux=True)(params)

        @fragment(role="buffer")
        def sample_batches(data, key):
            assert source is not None
            return draw(source, data, key, self.num_updates)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate):
            updates, opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
            return optax.apply_updates(params, updates), opt_state

        @fragment(role="learner")
        def learn(learner, progress, key, batches, held_out):
            def update(learner, batch, key, progress):
                params, target_params, opt_state = learner
                grads, stats = gradients(params, batch)
                params, opt_state = apply_update(params, opt_state, grads, learning_rate_at(self, progress))
                return (params, target_params, opt_state), stats

            return learn_from(batches, held_out, update, learner, key, progress)

        def iteration(state: OfflineState, progress: Progress) -> tuple[OfflineState, Metrics]:
            check_has_data(self, state)
            data_key, batches, held_out = sample_batches(state.data, state.data_key)
            learner = state.params, state.target_params, state.opt_state
            (params, target_params, opt_state), key, metrics = learn(learner, progress, state.key, batches, held_out)
            return OfflineState(params, target_params, opt_state, key, data_key, data=state.data), metrics

        def init(key: jax.Array) -> OfflineState:
            params_key, learner_key, data_key = jax.random.split(key, 3)
            params = policy.init(params_key, zeros(env.observation_space))
            return OfflineState(params, (), optimizer.init(params), learner_key, data_key)

        def act(state: OfflineState, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
            return to_env_action(choose(policy.apply(state.params, obs), key)), carry

        return Agent(
            init=init,
            iteration=iteration,
            act=act,
            axes=state_axes(source),
            steps_per_iteration=self.num_updates,
            updates_per_iteration=self.num_updates,
            env=venv,
            data={} if source is None else {"data": source.data},
            unit="updates",
        )
