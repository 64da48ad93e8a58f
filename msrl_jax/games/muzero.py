"""Gumbel MuZero (Schrittwieser et al., 2020, arXiv 1911.08265; Danihelka et al., 2022, openreview.net/forum?id=bERaNdoegnO).

A tree search in a learned model, without a simulator, improves the policy of a network at every step. An iteration

1. takes `T` steps of every environment, with actions chosen by searches with the acting parameters,
2. stores the steps and the improved policies in a replay buffer,
3. learns from `K` batches of windows of it: the model is unrolled from the first observation of a window along its actions, and
   learns to predict rewards, values and improved policies, but not observations.

In two-player games with alternating moves, the agent is the player to move. The next player's value is the negative of the
mover's, so the discount factor is negative.

The search uses mctx. In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs`, `B` is `batch_size`, `M` is
`model_steps`, `S` the length of a window, `M + n_step`, and `A` the number of actions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax import envs
from msrl_jax.agents.action_spaces import check_discrete
from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, split_keys, steps_before
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.configs.config import Activation, NetworkKind, OptimizerKind, Tunable, TunableOrNone, config, field, tunable
from msrl_jax.configs.replay_options import Replay
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform, action_type, uniform_actions
from msrl_jax.envs.base import PyTree, is_on_host
from msrl_jax.envs.masks import mask_of, observation_type, only_legal
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import advance, at_least
from msrl_jax.fragments.progress import parameter_version
from msrl_jax.games.latent_model import LatentModel, latent_model
from msrl_jax.games.tree_search import check_trees, cross_entropy, import_mctx
from msrl_jax.games.turn_based import OneMover, player_observation, vectorize_turns
from msrl_jax.loops.off_policy import (
    Batch,
    Learner,
    OffPolicyState,
    apply_if,
    draw,
    initial_state,
    is_due,
    learn_from,
    move_target,
    refreshed,
    state_axes,
)
from msrl_jax.loops.replay_buffers import window_buffer
from msrl_jax.losses.sequences import rescale, unrescale
from msrl_jax.networks.distributions import Categorical, choose
from msrl_jax.networks.torso import make_torso
from msrl_jax.networks.unrolls import Carry
from msrl_jax.replay import ReplayBuffer, Transition
from msrl_jax.returns import n_step_return


class SearchedAction(NamedTuple):
    """The action that was taken, and the policy of the search."""

    action: jax.Array  # [...] int32
    policy: jax.Array  # probabilities of the actions after the search, [..., A]


class Unrolled(NamedTuple):
    """Targets of the model along windows."""

    policy: jax.Array  # probabilities of actions, [M + 1, B, A]
    value: jax.Array  # [M + 1, B]
    reward: jax.Array  # of each step of the model, [M, B]
    lives: jax.Array  # whether the window's first episode continues, so that there is a policy, [M + 1, B] bool
    counts: jax.Array  # whether it continues or has terminated, so that value and reward are known, [M + 1, B] bool


ModelSearch = Callable[[Any, jax.Array, Any], tuple[jax.Array, jax.Array]]
"""`(params, keys [E], obs [E, ...]) -> (actions [E], policies [E, A])`"""


@config("muzero", multi_agent=None)
class MuZero:
    """Gumbel MuZero: a search in a learned model improves the policy that guides it; for discrete actions and games."""

    num_envs: int = field(default=32, doc="environments stepped in parallel, `E`. Usual: 1 to 1024.")
    unroll_length: int = field(default=8, doc="steps of every environment per iteration, `T`. Usual: 1 to 200.")
    num_simulations: int = field(default=16, doc="model steps of a search. Usual: 8 to 50; 2 and more suffice to learn.")
    max_considered: int = field(default=16, doc="actions considered at the root of a search. Usual: 16.")
    act_simulations: int = field(default=0, low=0, doc="simulations outside training; 0: no search. Usual: 0.")
    gumbel_scale: Tunable = tunable(default=1.0, low=0, doc="scale of the exploration noise; 0: none. Usual: 1.")
    value_scale: Tunable = tunable(default=0.02, low=0, doc="weight of values in the search. Usual: 0.02 to 0.1; 1 for Go.")
    random_share: Tunable = tunable(default=0.0, low=0, high=1, doc="share of random actions. Usual: 0 (the paper) to 0.1.")
    discount: Tunable = tunable(default=0.997, low=0, high=1, doc="discount factor per step. Usual: 0.99 to 0.997.")
    num_updates: int = field(default=8, doc="updates per iteration, `K`. Usual: each step in 1 to 8 batches.")
    batch_size: int = field(default=128, doc="windows per update, `B`. Usual: 128 to 1024.")
    model_steps: int = field(default=5, doc="steps that the model is unrolled to learn, `M`. Usual: 5.")
    replay: Replay = field(default=Replay(50_000, n_step=10), doc="the buffer. Usual: 1e4 to 1e6 steps.")
    learning_rate: Tunable = tunable(default=1e-3, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: TunableOrNone = tunable(default=5.0, above=0, doc="gradients are clipped to this global norm. Usual: 5.")
    value_coef: Tunable = tunable(default=1.0, low=0, doc="weight of the value loss. Usual: 0.25 to 1.")
    reward_coef: Tunable = tunable(default=1.0, low=0, doc="weight of the reward loss. Usual: 1; more for small rewards.")
    rescale_epsilon: Tunable = tunable(default=1e-3, above=0, doc="targets x become `sign(x) (sqrt(|x| + 1) - 1) + epsilon x`.")
    actor_period: int = field(default=1, low=1, high=2**24, doc="iterations between two copies to the actors. Usual: 1.")
    tau: Tunable = tunable(default=0.02, above=0, high=1, doc="target update rate; 1 copies. Usual: 1, or 0.005 to 0.05.")
    target_period: int = field(default=1, low=1, high=2**24, doc="updates between target updates. Usual: 1, or 100 to 1000.")
    latent_size: int = field(default=64, doc="size of the model's state, `H`. Usual: 32 to 512.")
    hidden_sizes: tuple[int, ...] = field(default=(64,), doc="widths of dense layers of each of the networks. Usual: (64,).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")

    def build(self, env: Environment) -> Agent:
        """Builds the agent for an environment or game; raises TypeError or ValueError if a space or a size is unsupported."""
        action_space, num_envs = check_discrete(type(self).__name__, env.action_space), self.num_envs
        to_env_action = action_transform(action_space)
        if is_game := envs.has_agents(env):
            venv: Any = vectorize_turns("muzero", env, num_envs)
            stepped_env: Any = OneMover(venv, env)
            observation, discount = player_observation(venv), -self.discount
        else:
            venv = stepped_env = envs.EpisodeStatistics(envs.vectorize(env, num_envs))
            observation, discount = observation_type(env), self.discount
        for simulations in ("num_simulations", "act_simulations"):
            check_trees(self, action_space.n, 4 * self.latent_size, simulations)
        model = latent_model(make_torso(venv.observation_space, self), action_space, latent_size=self.latent_size)
        policy = jax.ShapeDtypeStruct((action_space.n,), jnp.float32)
        choice = SearchedAction(action_type(action_space), policy)  # type: ignore[arg-type]
        buffer = unroll_buffer(observation, choice, self, may_be_invalid=is_on_host(env))
        search = model_searcher(self, model, self.num_simulations, self.gumbel_scale, discount)
        optimizer = make_optimizer(self, epsilon=1e-8)

        @fragment(role="learner")
        def gradients(params, target_params, batch: Batch):
            window: Transition = batch.experience
            _, next_value = model.predict(target_params, model.represent(target_params, window.next_obs))
            target = unrolled_target(
                window._replace(action=window.action.policy),
                unrescale(next_value, self.rescale_epsilon),
                discount=discount,
                num_steps=self.replay.n_step,
                model_steps=self.model_steps,
            )
            rescaled = {name: rescale(getattr(target, name), self.rescale_epsilon) for name in ("value", "reward")}
            target = target._replace(**rescaled)

            def loss(params):
                obs = jax.tree.map(lambda x: x[0], window.obs)
                predicted = unrolled(model, params, obs, window.action.action[: self.model_steps])
                losses, stats = unrolled_loss(*predicted, target, self.value_coef, self.reward_coef)
                return (batch.weight * losses).mean(), (jnp.zeros(self.batch_size, jnp.float32), stats)

            return jax.grad(loss, has_aux=True)(params)

        def prior(params: PyTree, obs: PyTree) -> Categorical:
            logits, _ = model.predict(params, model.represent(params, obs))
            return Categorical(only_legal(logits, obs))

        def probabilities(state: OffPolicyState, obs: PyTree) -> jax.Array:
            return searched(state, obs)[1] if self.act_simulations else prior(state.params, obs).probabilities()

        def act(state: OffPolicyState, obs: PyTree, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
            if not self.act_simulations:
                return to_env_action(choose(prior(state.params, obs), key, 1 + is_game)), carry
            action, policy = searched(state, obs)
            return to_env_action(action if key is None else choose(Categorical(jnp.log(policy)), key, 1 + is_game)), carry

        def searched(state: OffPolicyState, obs: PyTree) -> tuple[jax.Array, jax.Array]:
            """Returns the result of a search without noise, which does not depend on its key."""
            search = model_searcher(self, model, self.act_simulations, 0.0, discount)
            search = jax.vmap(search, in_axes=(None, 0, 0)) if is_game else search  # the waiting player has one action
            keys = jnp.broadcast_to(jax.random.key(0), jax.tree.leaves(obs)[0].shape[: 1 + is_game])
            return search(state.params, keys, obs)

        @fragment(role="actor", name="search")
        def search_actions(params, obs, keys, steps):
            keys, random_keys, action_key = jax.vmap(lambda key: jax.random.split(key, 3), out_axes=1)(keys)
            best_action, policy = search(params, keys, obs)
            share = jnp.where(at_least(steps, buffer.min_size), self.random_share, 1.0)
            at_random = jax.vmap(jax.random.uniform)(random_keys) < share
            return SearchedAction(jnp.where(at_random, uniform_actions(action_key, action_space, obs), best_action), policy)

        @fragment(role="env")
        def env_step(env_state, action):
            return stepped_env.step(env_state, to_env_action(action))

        @fragment(role="env")
        def pop_episodes(env_state):
            return venv.pop_episodes(env_state)

        @fragment(role="actor")
        def draw_keys(keys, progress):
            return *split_keys(keys, self.unroll_length), steps_before(self, progress)

        @fragment(role="buffer")
        def insert(replay, pending, items):
            return buffer.insert(buffer.update(replay, pending.indices, pending.td_error), items)

        @fragment(role="buffer")
        def sample_batches(replay, key, data, progress):
            return draw(buffer, replay, key, data, progress, self.num_updates)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate, ready):
            return apply_if(ready, optimizer, params, opt_state, grads, learning_rate)

        @fragment(role="server")
        def update_target(target_params, params, is_update_due):
            return move_target(target_params, params, self.tau, is_update_due)

        @fragment(role="learner")
        def learn(learner, progress, key, sample, ready):
            def update(learner, batch):
                grads, (td_error, stats) = gradients(learner.params, learner.target_params, batch)
                rate = learning_rate_at(self, progress)
                params, opt_state = apply_update(learner.params, learner.opt_state, grads, rate, ready)
                is_update_due = is_due(ready, advance(batch.update), self.target_period)
                return Learner(params, update_target(learner.target_params, params, is_update_due), opt_state), td_error, stats

            return learn_from(sample, ready, update, learner, key, progress, may_be_invalid=buffer.may_be_invalid)

        @fragment(role="learner")
        def refresh(acting_params, params, progress, version):
            return refreshed(acting_params, params, progress, version, self.actor_period)

        def iteration(state: OffPolicyState, progress: Progress) -> tuple[OffPolicyState, Metrics]:
            acting = state.acting_params
            acting_params = acting[0] if acting else state.params

            def step(loop, inputs):
                env_state, obs = loop
                choice = search_actions(acting_params, obs, *inputs)
                env_state, t = env_step(env_state, choice.action)
                item = Transition(obs, choice, t.reward, t.terminated, t.truncated, t.final_obs, valid=t.valid)
                return (env_state, t.obs), item

            actor_keys, *inputs = draw_keys(state.actor_keys, progress)
            (env_state, obs), items = jax.lax.scan(step, (state.env_state, state.obs), tuple(inputs))
            env_state, episodes = pop_episodes(env_state)
            replay = insert(state.replay, state.pending, items)
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
            env_state, obs = stepped_env.reset(env_key)
            params = model.init(params_key, obs)
            state = initial_state(self, buffer, Learner(params, params, optimizer.init(params)), *keys)
            return state._replace(env_state=env_state, obs=obs)

        return Agent(
            init=init,
            iteration=iteration,
            act=act,
            axes=state_axes(buffer, env_state=venv.axes, obs=P("env")),
            steps_per_iteration=num_envs * self.unroll_length,
            updates_per_iteration=self.num_updates,
            learning_starts=buffer.min_size,
            env=venv,
            probabilities=probabilities,
            ranked=not is_game,  # the returns of both players sum to 0
        )


def unroll_buffer(obs: PyTree, action: Any, config: MuZero, *, may_be_invalid: bool = False) -> ReplayBuffer:
    """Makes the buffer of windows that start at every step: `model_steps` model steps, and the `n_step` rewards after them."""
    return window_buffer(
        obs,
        action,
        config,
        config.batch_size,
        config.replay.shards,
        may_be_invalid=may_be_invalid,
        length=config.model_steps + config.replay.n_step,
        length_is="model_steps + n_step are",
    )


def model_searcher(
    config: MuZero, model: LatentModel, num_simulations: int, gumbel_scale: float, discount: float | jax.Array
) -> ModelSearch:
    """Makes the search of a config in a model, with these settings; raises ImportError without mctx."""
    mctx = import_mctx(config.name)  # type: ignore[attr-defined]

    def expand(params: PyTree, key: jax.Array, action: jax.Array, latent: jax.Array) -> tuple[Any, Any]:
        """Returns one step of the model from states `[1, H]`, as mctx requires."""
        latent, reward = model.step(params, latent, action)
        logits, value = model.predict(params, latent)
        reward, value = (unrescale(x, config.rescale_epsilon) for x in (reward, value))
        discounts = jnp.full_like(reward, discount)
        return mctx.RecurrentFnOutput(reward=reward, discount=discounts, prior_logits=logits, value=value), latent

    def search_one(params: PyTree, key: jax.Array, obs: PyTree) -> tuple[jax.Array, jax.Array]:
        obs = jax.tree.map(lambda x: x[None], obs)
        latent = model.represent(params, obs)
        logits, value = model.predict(params, latent)
        root = mctx.RootFnOutput(prior_logits=logits, value=unrescale(value, config.rescale_epsilon), embedding=latent)
        mask = mask_of(obs)
        search_result = mctx.gumbel_muzero_policy(
            params,
            key,
            root,
            expand,
            num_simulations,
            invalid_actions=None if mask is None else ~mask,
            max_num_considered_actions=config.max_considered,
            gumbel_scale=gumbel_scale,
            qtransform=functools.partial(mctx.qtransform_completed_by_mix_value, value_scale=config.value_scale),
        )
        return search_result.action[0], search_result.action_weights[0]

    # Every environment has its own key, so that search results do not depend on which environments share a device.
    return jax.vmap(search_one, in_axes=(None, 0, 0))


def unrolled(model: LatentModel, params: PyTree, obs: PyTree, actions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the model's logits, values and rewards for observations `[B, ...]` and actions `[M, B]`, as in `Unrolled`."""
    latent = model.represent(params, obs)

    def step(latent: jax.Array, action: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        latent, reward = model.step(params, latent, action)
        # Halving the gradient at each step keeps its size independent of the number of steps (the paper's appendix G).
        return latent / 2 + jax.lax.stop_gradient(latent) / 2, (latent, reward)

    _, (latents, reward) = jax.lax.scan(step, latent, actions)
    logits, value = model.predict(params, jnp.concatenate([latent[None], latents]))
    return logits, value, reward


def unrolled_target(
    window: Transition, next_value: jax.Array, *, discount: float, num_steps: int, model_steps: int
) -> Unrolled:
    """Computes the model's targets along windows of steps whose actions are policies.

    After a terminal state, rewards and values are 0 for all actions; after a truncation, they are unknown.

    Args:
      window: the steps. `[S, B, ...]`
      next_value: values of the true successors. `[S, B]`
      discount: discount factor per step; negative if the players alternate.
      num_steps: number of rewards to sum before bootstrapping.
      model_steps: number of model steps, `M`, at most `S - num_steps`.

    Returns:
      The targets.
    """
    flags = window.terminated, window.truncated
    value = n_step_return(window.reward, next_value, *flags, discount=discount, num_steps=num_steps)
    ended = flags[0] | flags[1]
    ended_before = lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), jnp.cumsum(x[:-1], 0) > 0])
    lives = ~ended_before(ended)
    counts = lives | ended_before(lives & window.terminated)
    value, reward = (jnp.where(lives, x, 0.0)[: model_steps + 1] for x in (value, window.reward))
    return Unrolled(window.action[: model_steps + 1], value, reward[:-1], lives[: model_steps + 1], counts[: model_steps + 1])


def unrolled_loss(
    logits: jax.Array, value: jax.Array, reward: jax.Array, target: Unrolled, value_coef: float, reward_coef: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the losses `[B]` of the model's predictions, and statistics (arXiv 1911.08265, eq. 1 and appendix G).

    Args:
      logits: logits of actions. `[M + 1, B, A]`
      value: values, in units of the targets. `[M + 1, B]`
      reward: rewards, in units of the targets. `[M, B]`
      target: the targets.
      value_coef: weight of the value loss.
      reward_coef: weight of the reward loss.

    Returns:
      The losses of the policy (cross-entropy), the value and the reward (half the squared errors), and their means. Predictions
      without the model have weight 1, those after each model step `1 / M`.
    """
    policy_loss = jnp.where(target.lives, cross_entropy(target.policy, logits), 0.0)
    value_loss = jnp.where(target.counts, optax.l2_loss(value, target.value), 0.0)
    reward_loss = jnp.where(target.counts[:-1], optax.l2_loss(reward, target.reward), 0.0)
    share = jnp.full((len(logits), 1), 1 / len(reward)).at[0].set(1.0)
    losses = (share * (policy_loss + value_coef * value_loss)).sum(0) + reward_coef * (share[1:] * reward_loss).sum(0)
    stats = {"policy_loss": policy_loss[0], "value_loss": value_loss[0], "reward_loss": reward_loss}
    stats |= {"entropy": Categorical(logits[0]).entropy(), "value": value[0]}
    return losses, {name: x.mean() for name, x in stats.items()}
