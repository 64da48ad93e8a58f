"""Gumbel AlphaZero (Danihelka et al., 2022, openreview.net/forum?id=bERaNdoegnO), for two-player games with alternating moves.

A tree search with the real game improves the network's policy in every position; the network learns the improved policies and
the outcomes of the games (Silver et al., 2018, doi:10.1126/science.aar6404). The search uses mctx. An iteration

1. plays `T` moves of every game, chosen by searches with the acting parameters, except for a share of random moves,
2. computes the target value of every position: the rewards up to the end of the game; or up to the end of the unroll or a
   truncation, plus the network's value there; or up to a random move, plus the search's value before it,
3. stores positions, improved policies and target values in a replay buffer, and learns from `K` batches of it.

Values are those of the player to move, so they change sign with the player. The paper has no random moves. Without them, a
deterministic policy plays the same few games, and the network forgets other positions.

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs`, `B` is `batch_size`, `K` is `num_updates` and `A` the
number of actions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax import replay
from msrl_jax.agents.action_spaces import check_discrete
from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, split_keys
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
from msrl_jax.configs.options import option
from msrl_jax.envs import MaskedObservation, MultiAgentEnvironment, vectorize_agents
from msrl_jax.envs.base import PyTree, output_shapes
from msrl_jax.envs.masks import sample_legal
from msrl_jax.fragments import fragment
from msrl_jax.fragments.progress import parameter_version
from msrl_jax.fragments.runtime.memory import tree_bytes
from msrl_jax.games.tree_search import check_trees, cross_entropy, import_mctx
from msrl_jax.games.turn_based import check_turns, of_player, player_observation, turn_actions, vectorize_turns
from msrl_jax.loops.off_policy import (
    Batch,
    Learner,
    OffPolicyState,
    apply_if,
    draw,
    initial_state,
    learn_from,
    refreshed,
    state_axes,
)
from msrl_jax.networks.distributions import choose
from msrl_jax.networks.policy_and_value import policy_and_value
from msrl_jax.networks.torso import make_torso
from msrl_jax.networks.unrolls import flatten, unflatten
from msrl_jax.replay.buffers import storage_of
from msrl_jax.returns import lambda_return


class Example(NamedTuple):
    """Training data of a position."""

    obs: MaskedObservation  # of the player to move, [..., *observation_shape]
    policy: jax.Array  # probabilities of the actions after the search, [..., A]
    value: jax.Array  # target value for that player, [...]


class PlayerMove(NamedTuple):
    """Who moved, and whether at random."""

    player: jax.Array  # 0 or 1, [...] int32
    random: jax.Array  # whether at random, [...] bool


class MoveOutcome(NamedTuple):
    """The outcome of a move."""

    reward: jax.Array  # of the first player, [...]
    terminated: jax.Array  # whether the game is over, [...] bool
    truncated: jax.Array  # whether it was cut short, [...] bool
    obs: MaskedObservation  # of the player to move next, before any reset, [..., *observation_shape]
    player: jax.Array  # the player to move next, 0 or 1, [...] int32


Search = Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, Example, PlayerMove]]
"""`(params, keys [E], states [E, ...], obs [E, 2, ...]) -> (actions [E, 2], examples [E, ...], moves [E])`; the value of an
example is that of the move chosen by the search."""


@option
class Positions:
    """A buffer of positions, from which batches are drawn."""

    capacity: int = field(default=32768, doc="positions that the buffer holds. Usual: those of 1 to 50 iterations.")
    learning_starts: int | None = field(default=None, doc="positions before learning; None: one batch. Usual: None.")
    storage: CodecName | None = field(default=None, doc='codec of observations ("uint8": whole numbers). Usual: None, "uint8".')
    shards: int | None = field(default=None, doc="parts of the buffer; None: gcd of `batch_size`, `num_envs`, 8. Usual: None.")


@config("alphazero", multi_agent=True)
class AlphaZero:
    """Gumbel AlphaZero: a network guides a search and learns from it, in two-player games with perfect information."""

    num_envs: int = field(default=128, doc="games played in parallel, `E`. Usual: 64 to 1024.")
    unroll_length: int = field(default=16, doc="moves of every game per iteration, `T`. Usual: 16 to 256.")
    num_simulations: int = field(default=32, doc="positions evaluated per search. Usual: 16 to 200; 800 for chess.")
    max_considered: int = field(default=16, doc="moves considered at the root of a search. Usual: 16.")
    gumbel_scale: Tunable = tunable(default=1.0, low=0, doc="scale of the exploration noise; 0: none. Usual: 1.")
    random_share: Tunable = tunable(default=0.1, low=0, high=1, doc="share of random moves. Usual: 0 (the paper) to 0.2.")
    discount: Tunable = tunable(default=1.0, low=0, high=1, doc="discount factor per move. Usual: 1, or 0.99 to 0.999.")
    num_updates: int = field(default=32, doc="updates per iteration, `K`. Usual: each position in 1 to 8 batches.")
    batch_size: int = field(default=256, doc="positions per update, `B`. Usual: 128 to 4096.")
    replay: Positions = field(default=Positions(), doc="the buffer of positions. Usual: 1e4 to 1e6.")
    learning_rate: Tunable = tunable(default=2e-3, above=0, doc="step size of updates. Usual: 2e-4 to 2e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: TunableOrNone = tunable(default=1.0, above=0, doc="gradients are clipped to this global norm. Usual: 1.")
    value_coef: Tunable = tunable(default=1.0, low=0, doc="weight of the value loss, half the squared error. Usual: 0.5 to 2.")
    actor_period: int = field(default=1, low=1, high=2**24, doc="iterations between two copies to the actors. Usual: 1.")
    hidden_sizes: tuple[int, ...] = field(default=(128, 128), doc="widths of dense layers. Usual: (128, 128).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")

    def build(self, env: MultiAgentEnvironment) -> Agent:
        """Builds the agent for one game; raises ImportError without mctx, TypeError or ValueError for unsupported games."""
        search, network = searcher(self, env)
        venv, num_envs = vectorize_turns("alphazero", env, self.num_envs), self.num_envs
        buffer, optimizer = positions(self, env), make_optimizer(self, epsilon=1e-8)

        @fragment(role="learner")
        def gradients(params, target_params, batch: Batch):
            example: Example = batch.experience

            def loss(params):
                policy, value = network.apply(params, example.obs)
                policy_loss = cross_entropy(example.policy, policy.logits).mean()
                value_loss = optax.l2_loss(value, example.value).mean()
                stats = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": policy.entropy().mean()}
                return policy_loss + self.value_coef * value_loss, (jnp.zeros(self.batch_size, jnp.float32), stats)

            return jax.grad(loss, has_aux=True)(params)

        search_moves = fragment(role="actor", name="search")(search)

        @fragment(role="env")
        def env_step(env_state, action):
            env_state, t = venv.step(env_state, action)
            player = t.final_state[:, 0].astype(jnp.int32)
            is_over = t.terminated.all(-1)
            return env_state, t.obs, MoveOutcome(t.reward[:, 0], is_over, t.truncated, of_player(t.final_obs, player), player)

        @fragment(role="actor")
        def worth(params, estimate, move, outcome):
            next_value = unflatten(network.value(params, flatten(outcome.obs)), self.unroll_length)
            return position_worth(estimate, move, outcome, next_value, self.discount)

        @fragment(role="env")
        def pop_episodes(env_state):
            return venv.pop_episodes(env_state)

        @fragment(role="actor")
        def draw_keys(keys, progress):
            return split_keys(keys, self.unroll_length)

        @fragment(role="buffer")
        def insert(replay, pending, items):
            return buffer.insert(buffer.update(replay, pending.indices, pending.td_error), items)

        @fragment(role="buffer")
        def sample_batches(replay, key, data, progress):
            return draw(buffer, replay, key, data, progress, self.num_updates)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate, ready):
            return apply_if(ready, optimizer, params, opt_state, grads, learning_rate)

        @fragment(role="learner")
        def learn(learner, progress, key, sample, ready):
            def update(learner, batch):
                grads, (td_error, stats) = gradients(learner.params, learner.target_params, batch)
                rate = learning_rate_at(self, progress)
                params, opt_state = apply_update(learner.params, learner.opt_state, grads, rate, ready)
                return Learner(params, (), opt_state), td_error, stats

            return learn_from(sample, ready, update, learner, key, progress, may_be_invalid=buffer.may_be_invalid)

        @fragment(role="learner")
        def refresh(acting_params, params, progress, version):
            return refreshed(acting_params, params, progress, version, self.actor_period)

        def iteration(state: OffPolicyState, progress: Progress) -> tuple[OffPolicyState, Metrics]:
            acting = state.acting_params
            acting_params = acting[0] if acting else state.params

            def step(loop, keys):
                env_state, obs = loop
                action, example, move = search_moves(acting_params, keys, venv.states(env_state), obs)
                env_state, obs, outcome = env_step(env_state, action)
                return (env_state, obs), (example, move, outcome)

            actor_keys, keys = draw_keys(state.actor_keys, progress)
            (env_state, obs), (examples, move, outcome) = jax.lax.scan(step, (state.env_state, state.obs), keys)
            env_state, episodes = pop_episodes(env_state)
            examples = examples._replace(value=worth(acting_params, examples.value, move, outcome))
            replay = insert(state.replay, state.pending, examples)
            replay_key, sample, ready, report = sample_batches(replay, state.replay_key, state.data, progress)
            learner, key, pending, metrics = learn(state.learner, progress, state.key, sample, ready)
            if acting:
                acting, age = refresh(acting, learner.params, progress, parameter_version(acting[1].low))
                metrics = metrics | age
            next_state = state._replace(
                **learner._asdict(),
                key=key,
                acting_params=acting,
                actor_keys=actor_keys,
                replay=replay,
                replay_key=replay_key,
                pending=pending,
                env_state=env_state,
                obs=obs,
            )
            return next_state, {**metrics, **report, **episodes}

        def init(key: jax.Array) -> OffPolicyState:
            params_key, env_key, *keys = jax.random.split(key, 5)
            env_state, obs = venv.reset(env_key)
            params = network.init(params_key, of_player(obs, jnp.zeros(num_envs, jnp.int32)))
            state = initial_state(self, buffer, Learner(params, (), optimizer.init(params)), *keys)
            return state._replace(env_state=env_state, obs=obs)

        def act(state: OffPolicyState, obs: PyTree, key: jax.Array | None, carry: PyTree) -> tuple[jax.Array, PyTree]:
            return choose(network.policy(state.params, obs), key, 2), carry

        return Agent(
            init=init,
            iteration=iteration,
            act=act,
            axes=state_axes(buffer, env_state=venv.axes, obs=P("env")),
            steps_per_iteration=num_envs * self.unroll_length,
            updates_per_iteration=self.num_updates,
            learning_starts=buffer.min_size,
            env=venv,  # type: ignore[arg-type]
            probabilities=lambda state, obs: network.policy(state.params, obs).probabilities(),
            ranked=False,  # the returns of both players sum to 0
        )

    def search(self, env: MultiAgentEnvironment) -> Search:
        """Returns the search of this config in a game; raises the same errors as `build`."""
        return searcher(self, env)[0]


def searcher(config: AlphaZero, env: MultiAgentEnvironment) -> tuple[Search, Any]:
    """Makes the search of a config in a game, and its network, a `PolicyAndValue`; raises the same errors as `build`."""
    mctx = import_mctx(config.name)  # type: ignore[attr-defined]
    action_space = check_discrete(type(config).__name__, env.action_space)
    check_turns("alphazero", env)
    state, _ = output_shapes(env.reset)
    check_trees(config, action_space.n, tree_bytes(state))
    network: Any = policy_and_value(make_torso(env.observation_space, config), action_space, shared_torso=True)

    def masked_obs_of(state: PyTree, obs: PyTree, player: jax.Array) -> MaskedObservation:
        return jax.tree.map(lambda x: x[player], MaskedObservation(obs, env.action_mask(state)))  # type: ignore[attr-defined]

    def expand(params: PyTree, key: jax.Array, action: jax.Array, states: PyTree) -> tuple[Any, PyTree]:
        """Returns one step of the game from every state `[1, ...]`, as mctx requires."""

        def step(action: jax.Array, state: PyTree) -> tuple[Any, ...]:
            player = env.to_move(state)  # type: ignore[attr-defined]
            next_state, obs, reward, terminated, _ = env.step(key, state, turn_actions(env, state, player, action))
            next_player = env.to_move(next_state)  # type: ignore[attr-defined]
            discount = jnp.where(next_player == player, config.discount, -config.discount)
            is_over = terminated.all()
            return (
                next_state,
                masked_obs_of(next_state, obs, next_player),
                reward[player].astype(jnp.float32),
                jnp.where(is_over, 0.0, discount),
                is_over,
            )

        next_states, obs, reward, discount, is_over = jax.vmap(step)(action, states)
        policy, value = network.apply(params, obs)
        value = jnp.where(is_over, 0.0, value)
        out = mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=policy.logits, value=value)
        return out, next_states

    def search_one(params: PyTree, key: jax.Array, state: PyTree, obs: PyTree) -> tuple[jax.Array, Example, PlayerMove]:
        player = env.to_move(state)  # type: ignore[attr-defined]
        key, random_key, action_key = jax.random.split(key, 3)
        own_obs = of_player(obs, player)
        states, batch = jax.tree.map(lambda x: x[None], (state, own_obs))
        policy, value = network.apply(params, batch)
        root = mctx.RootFnOutput(prior_logits=policy.logits, value=value, embedding=states)
        search_result = mctx.gumbel_muzero_policy(
            params,
            key,
            root,
            expand,
            config.num_simulations,
            invalid_actions=~batch.action_mask,
            max_num_considered_actions=config.max_considered,
            gumbel_scale=config.gumbel_scale,
        )
        best_action = search_result.action[0]
        value = search_result.search_tree.summary().qvalues[0, best_action]
        is_random = jax.random.bernoulli(random_key, jnp.float32(config.random_share))
        action = jnp.where(is_random, sample_legal(action_key, own_obs.action_mask), best_action)
        return (
            turn_actions(env, state, player, action),
            Example(own_obs, search_result.action_weights[0], value),
            PlayerMove(player, is_random),
        )

    # Every game has its own key, so that search results do not depend on which games share a device.
    return jax.vmap(search_one, in_axes=(None, 0, 0, 0)), network


def positions(config: AlphaZero, env: MultiAgentEnvironment) -> replay.ReplayBuffer:
    """Makes the buffer of examples; raises ValueError if sizes are incompatible."""
    obs = player_observation(vectorize_agents(env, 1))
    policy, value = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (obs.action_mask.shape, ()))
    example = Example(obs, policy, value)  # type: ignore[arg-type]
    storage: Any = storage_of(config.replay.storage, obs)
    storage = storage and {name: codec for name, codec in storage.items() if name != "next_obs"}
    try:
        return replay.uniform(
            example,
            capacity=config.replay.capacity,
            num_envs=config.num_envs,
            unroll_length=config.unroll_length,
            batch_size=config.batch_size,
            min_size=config.replay.learning_starts,
            shards=config.replay.shards,
            storage=storage,
        )
    except ValueError as error:
        text = str(error).replace("min_size", "learning_starts")  # the name of the config field and the flag
        raise ValueError(f"{type(config).__name__}, whose positions are the buffer's steps: {text}") from None


def position_worth(
    estimate: jax.Array, move: PlayerMove, outcome: MoveOutcome, next_value: jax.Array, discount: float
) -> jax.Array:
    """Computes target values of positions for their players: the following rewards, as long as the search chose the moves.

    Args:
      estimate: the search's values of the positions, used before random moves. `[T, E]`
      move: the moves.
      outcome: their outcomes.
      next_value: values of the positions after the moves, for the player to move there; used at the end of the unroll and
        where a game was truncated. `[T, E]`
      discount: discount factor per move.

    Returns:
      The values. `[T, E]`
    """
    # Compute everything for the first player; the second player's values are its losses, whoever moves next.
    sign, next_sign = (jnp.where(player == 0, 1.0, -1.0) for player in (move.player, outcome.player))
    reward = jnp.where(move.random, sign * estimate, outcome.reward)
    ends = outcome.terminated | move.random, outcome.truncated
    return sign * lambda_return(reward, next_sign * next_value, *ends, discount=discount, lambda_=1.0)
