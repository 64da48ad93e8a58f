"""R2D2: recurrent deep Q-learning from replayed sequences (Kapturowski et al., 2019).

"Recurrent Experience Replay in Distributed Reinforcement Learning", https://openreview.net/forum?id=r1lyTjAqYX. This file has
the loss; the loop and the update are in `loops/off_policy.py`.

In the shape descriptions, `T` is `unroll_length`, `B` is `batch_size`, `A` the number of actions, `H` is `memory_size`, `L` is
`trace_length` and `S` the length of a window. A window has three parts. The first `burn_in` steps only refresh the stored
carry. The loss is taken over the next `L` steps. The final `n_step - 1` steps are only used in targets.
"""

from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax import envs
from msrl_jax.algorithms.agent import Agent
from msrl_jax.algorithms.config import (
    Activation,
    CoreKind,
    NetworkKind,
    OptimizerKind,
    Tunable,
    TunableOrNone,
    config,
    field,
    tunable,
)
from msrl_jax.algorithms.loops.buffers import action_type, check_discrete, sequence_buffer
from msrl_jax.algorithms.loops.off_policy import Batch, Carry, epsilon_greedy, gradient_rule, off_policy_agent
from msrl_jax.algorithms.loops.sequences import recurrent_q_network, sequence_loss, sequence_target
from msrl_jax.algorithms.loops.windows import replay_values, successors
from msrl_jax.algorithms.networks.q_network import greedy_target
from msrl_jax.algorithms.optimizers import make_optimizer
from msrl_jax.algorithms.options import Annealed, PerEnv, Prioritized, Replay
from msrl_jax.envs import Environment
from msrl_jax.envs.base import is_on_host
from msrl_jax.envs.masks import observation_type, only_legal
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import Counter
from msrl_jax.replay import Transition


@config("r2d2")
class R2D2:
    """Recurrent deep Q-learning from replayed sequences; for discrete actions.

    The defaults are for small tasks on a CPU. There are other differences from the paper. Windows may span several episodes;
    the carry is cleared between them, and time limits bootstrap. The network does not observe the last action and reward. A
    new window has the largest priority so far; in the paper, the actor computes an initial priority.
    """

    num_envs: int = field(default=16, doc="environments stepped in parallel, `E`. Usual: 1 to 256.")
    unroll_length: int = field(default=16, doc="steps of every environment per iteration, `T`. Usual: 1 to 40.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    num_updates: int = field(default=4, doc="updates per iteration, `K`. Usual: 1/8 to 1 per environment step.")
    batch_size: int = field(default=32, doc="windows per update, `B`. Usual: 32 to 512.")
    replay: Replay = field(
        default=Replay(50_000, n_step=5, learning_starts=2000, priorities=Prioritized(0.9, None)),
        doc="the buffer. Usual: 1e4 to 1e6 steps.",
    )
    learning_rate: Tunable = tunable(default=0.001, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: Tunable = tunable(default=10.0, above=0, doc="gradients are clipped to this global norm. Usual: 10 to 40.")
    exploration: Annealed | PerEnv = field(default=Annealed(20_000), doc="how random actions are. Usual: annealed.")
    actor_period: int = field(default=1, low=1, high=2**24, doc="iterations between two copies to the actors. Usual: 1.")
    tau: Tunable = tunable(default=0.02, above=0, high=1, doc="how far the target moves; 1 copies. Usual: 1, or 0.005 to 0.05.")
    target_period: int = field(default=1, low=1, high=2**24, doc="updates per move of the target. Usual: 1, or 100 to 10,000.")
    dueling: bool = field(default=True, doc="whether values and advantages have streams of their own. Usual: True for images.")
    huber_delta: TunableOrNone = tunable(
        default=None, above=0, doc="errors above it count linearly (Huber). Usual: None, or 1."
    )
    adam_epsilon: Tunable = tunable(default=1e-05, above=0, doc="small number in Adam's denominator. Usual: 1e-8 to 1e-3.")
    hidden_sizes: tuple[int, ...] = field(default=(64,), doc="widths of layers before the core. Usual: (64,); images (128,).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    core: CoreKind = field(default="gru", doc='recurrent layer; "min_gru" is fastest. Usual: "gru".')
    memory_size: int = field(default=64, doc="size of the recurrent state, `H`. Usual: 64 to 512.")
    burn_in: int = field(default=8, low=0, doc="first steps of a window, which only refresh the stored carry. Usual: 0 to 40.")
    trace_length: int = field(default=32, doc="steps of a window in the loss, `L`; windows overlap by half. Usual: 16 to 80.")
    rescale_epsilon: TunableOrNone = tunable(
        default=None,
        above=0,
        doc="the network learns the return as `sign(x) (sqrt(|x| + 1) - 1) + rescale_epsilon x` (arXiv 1805.11593), or None: "
        "itself. Usual: None, or 1e-3.",
    )
    eta: Tunable = tunable(
        default=0.9, low=0, high=1, doc="weight of the largest error in a priority, not the mean. Usual: 0.9."
    )

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        action_space = check_discrete("R2D2", env.action_space)
        venv = envs.EpisodeStatistics(envs.vectorize(env, self.num_envs))
        network = recurrent_q_network(venv.observation_space, action_space, self, dueling=self.dueling)
        carry = jax.eval_shape(lambda: network.initial_carry(()))
        obs, action = observation_type(env), action_type(action_space)
        buffer = sequence_buffer(obs, action, self, carry, may_be_absent=is_on_host(env))
        optimizer = make_optimizer(self, epsilon=self.adam_epsilon)

        @fragment(role="learner")
        def gradients(params, target_params, batch: Batch):
            window: Transition = batch.experience
            after = jax.tree.map(lambda x: x[self.burn_in :], window)
            next_target = successors(
                network, target_params, after, *replay_values(network, target_params, window, self.burn_in)
            )

            def loss(params):
                values, carries = replay_values(network, params, window, self.burn_in)
                chooser = successors(network, *jax.lax.stop_gradient((params, after, values, carries)))
                next_value = jax.vmap(jax.vmap(greedy_target))(only_legal(chooser, after.next_obs), next_target)
                target = sequence_target(
                    next_value, after, discount=self.discount, num_steps=self.replay.n_step, epsilon=self.rescale_epsilon
                )
                taken = jnp.take_along_axis(values, after.action[..., None], -1)[: self.trace_length, :, 0]
                return sequence_loss(batch.weight, taken, target, self.huber_delta, self.eta)

            return jax.grad(loss, has_aux=True)(params)

        def choose_action(params: Any, obs: jax.Array, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
            values, carry = network.step(params, obs, carry)
            return only_legal(values, obs).argmax(-1).astype(jnp.int32), carry

        randomly = epsilon_greedy(
            self.exploration, num_envs=self.num_envs, num_actions=action_space.n, random_steps=buffer.min_size
        )

        def explore(params: Any, obs: jax.Array, keys: jax.Array, steps: Counter, carry: Carry) -> tuple[jax.Array, Carry]:
            greedy, carry = choose_action(params, obs, None, carry)
            return randomly(greedy, keys, steps, obs), carry

        init, initial_carry = lambda key, obs: network.init(key), lambda num_envs: network.initial_carry((num_envs,))
        rule = gradient_rule(self, optimizer, init, gradients, choose_action, initial_carry=initial_carry)
        return off_policy_agent(self, venv, buffer, rule, explore)
