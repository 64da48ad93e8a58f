"""Self-play for two-player zero-sum games: PPO against its own past.

In every environment, one seat is the learner's, and the other an opponent's: the current parameters, or frozen ones from a
pool. The learner has the first seat in half of the environments, the second in the others. The pool keeps copies of past
parameters; a new one replaces the oldest. Opponents are drawn in every iteration, the current parameters with probability
`latest_share`: 1 is plain self-play, and 0.8 is OpenAI Five's value (Berner et al., 2019, arXiv 1912.06680).

Without an entropy bonus, policies chase each other in circles, and only their average approaches an equilibrium. With one, the
current policy itself does: the larger the bonus, the faster, and the farther from the equilibrium it ends (Sokota et al., 2022,
arXiv 2206.05825; for PPO, Rudolph et al., 2025, arXiv 2502.08938). The bonus is therefore large, and advantages keep the unit
of the return, so that its weight is meaningful.

With `opponents="payoff"`, the pool is a population as in PSRO (Lanctot et al., 2017, arXiv 1711.00832): the returns of the
current parameters against each opponent fill a payoff matrix, whose equilibrium gives the weights of the opponents.

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs`, `K` is `pool_size` and `G` is `num_opponents`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics, Progress, logical_axes, split_keys
from msrl_jax.algorithms.ippo import IPPO
from msrl_jax.configs.checking import is_constant
from msrl_jax.configs.config import (
    Activation,
    NetworkKind,
    Normalization,
    OptimizerKind,
    Tunable,
    TunableOrNone,
    config,
    field,
    tunable,
)
from msrl_jax.configs.replacing import replace_unchecked
from msrl_jax.envs import MultiAgentEnvironment, VectorizedAgents, vectorize_agents
from msrl_jax.envs.base import PyTree, env_name
from msrl_jax.fragments import fragment
from msrl_jax.fragments.metrics import Mean
from msrl_jax.loops.minibatches import check_minibatches
from msrl_jax.loops.teams import Experience, Now, Team, teams_agent

_ROUNDS = 2048
"""Number of rounds of the replicator dynamics."""
_EXPLORATION = 0.1
"""Share of the pool's opponents that are drawn uniformly, so that all pairs meet."""


class Standings(NamedTuple):
    """Results of games between past policies, and of the current policy against them."""

    payoff: jax.Array  # the mean return of one policy against another, [K, K]
    weights: jax.Array  # the equilibrium of that game, [K]
    total: jax.Array  # the sum of the current policy's returns against each, since the last policy entered, [K]
    games: jax.Array  # their number, [K]


class Pool(NamedTuple):
    """The opponents."""

    params: PyTree  # past parameters, [K, ...]
    filled: jax.Array  # number of entries in use, int32 []
    slot: jax.Array  # slot of the next entry, int32 []
    wait: jax.Array  # iterations until then, int32 []
    drawn: jax.Array  # opponents of this iteration: a slot, or -1 for the current parameters, int32 [G]
    key: jax.Array  # for drawing opponents
    actor_keys: jax.Array  # one per environment, for sampling the opponent's actions, [E]
    standings: Standings | tuple[()]  # () if opponents are drawn uniformly


class Players(NamedTuple):
    """The state of self-play other than the parameters."""

    learner: PyTree  # the state of the learner's team
    pool: Pool


@config("self_play", multi_agent=True)
class SelfPlay:
    """PPO against its own past in two-player games, with one feed-forward network that sees its seat's observations."""

    num_envs: int = field(default=64, doc="environments stepped in parallel, `E`. Usual: 8 to 4096.")
    unroll_length: int = field(default=32, doc="steps of every environment per iteration, `T`. Usual: 16 to 256.")
    num_epochs: int = field(default=4, doc="passes over the batch per iteration. Usual: 3 to 10.")
    num_minibatches: int = field(default=4, doc="updates per pass, a divisor of `T`, or with a core of `E`. Usual: 4 to 32.")
    learning_rate: Tunable = tunable(default=1e-3, adaptive=True, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: TunableOrNone = tunable(default=0.5, above=0, doc="gradients are clipped to this global norm. Usual: 0.5.")
    discount: Tunable = tunable(default=1.0, low=0, high=1, doc="discount factor per step. Usual: 1, or 0.99 to 0.999.")
    gae_lambda: Tunable = tunable(default=0.95, low=0, high=1, doc="lambda of advantages: 0 bias, 1 variance. Usual: 0.95.")
    normalize_advantage: Normalization = field(default="none", doc='how to standardize advantages. Usual: "none".')
    clip_ratio: Tunable = tunable(default=0.2, above=0, doc="clip of the probability ratio around 1. Usual: 0.1 to 0.3.")
    clip_value: TunableOrNone = tunable(default=None, above=0, doc="clip of the critic's change, in its units. Usual: None.")
    target_kl: TunableOrNone = tunable(
        default=None, above=0, doc="KL (nats) above which the rest of an iteration changes nothing. Usual: None, 0.01 to 0.03."
    )
    entropy_coef: Tunable = tunable(
        default=0.15, low=0, doc="weight of the entropy bonus. Usual: 0.05 to 0.3 (returns near 1)."
    )
    value_coef: Tunable = tunable(default=0.5, low=0, doc="weight of the value loss, half the squared error. Usual: 0.5 to 1.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (64, 64).")
    activation: Activation = field(default="tanh", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "tanh".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    shared_torso: bool = field(default=False, doc="whether policy and value share a torso. Usual: False; images: True.")
    normalize_values: bool = field(default=False, doc="whether to normalize value targets. Usual: False.")
    pool_size: int = field(default=16, doc="number of past parameters in the pool, `K`. Usual: 8 to 64.")
    pool_period: int = field(default=10, doc="iterations between two copies into the pool. Usual: 1 to 100.")
    latest_share: Tunable = tunable(
        default=0.8, low=0, high=1, doc="probability of playing the current policy. Usual: 0.5 to 1."
    )
    opponents: Literal["uniform", "payoff"] = field(
        default="uniform",
        doc='how to draw opponents from the pool: "uniform", or "payoff" by the equilibrium between its members. Usual: '
        '"uniform", or "payoff" for games in which policies beat each other in circles.',
    )
    num_opponents: int = field(default=8, doc="opponents per iteration, `G`, each in `num_envs / G`. Usual: 4 to 32.")

    def check(self) -> None:
        """Raises ValueError unless the opponents fill the environments, and the minibatches divide the time steps."""
        check_minibatches(self)
        block = 2 * self.num_opponents
        if self.num_envs % block:
            raise ValueError(
                f"{type(self).__name__}.num_envs={self.num_envs} cannot be split into both seats against each of "
                f"num_opponents={self.num_opponents}; use num_envs={self.num_envs + -self.num_envs % block}, or a "
                "num_opponents that divides its half"
            )

    def build(self, env: MultiAgentEnvironment) -> Agent:
        """Builds the agent for a two-player game; raises TypeError or ValueError if the game or a space is unsupported."""
        if len(env.agents) != 2:
            raise ValueError(
                f"self_play needs two players, but environment {env_name(env)!r} has {len(env.agents)} agents; "
                "use ippo or mappo"
            )
        venv = vectorize_agents(env, self.num_envs)
        agent = teams_agent(venv, {"agents": two_players(venv, self)}, unroll_length=self.unroll_length)
        return dataclasses.replace(agent, ranked=False)  # the returns of both players sum to 0


def two_players(venv: VectorizedAgents, config: SelfPlay) -> Team:
    """Makes a team of both players: opponent `e % G` plays in environment `e`, in the second seat if `e // G` is even."""
    common = {f.name: getattr(config, f.name) for f in dataclasses.fields(IPPO) if hasattr(config, f.name)}
    learner = replace_unchecked(IPPO(), common).build_team(venv, 1)
    groups = config.num_envs // config.num_opponents
    weighs = config.opponents == "payoff"
    is_first_seat = np.arange(config.num_envs) // config.num_opponents % 2 == 0

    def seat_part(is_first: np.ndarray, x: PyTree) -> PyTree:
        """Returns the first seat's part of `[E, 2, ...]` where `is_first`, otherwise the second's. `[E, 1, ...]`."""

        def one(x: jax.Array) -> jax.Array:
            return jnp.where(is_first.reshape(-1, *(1,) * (x.ndim - 1)), x[:, :1], x[:, 1:])

        return jax.tree.map(one, x)

    def learner_part(x: PyTree) -> PyTree:
        """Returns the learner's part of `[E, 2, ...]`."""
        return seat_part(is_first_seat, x)

    def group_by_opponent(x: PyTree) -> PyTree:
        """Groups environments by opponents: `[E, ...] -> [E / G, G, ...]`."""
        return jax.tree.map(lambda x: x.reshape(groups, config.num_opponents, *x.shape[1:]), x)

    def seats_as_rows(x: PyTree) -> PyTree:
        """Seats as rows of a single network: `[E, 2, ...] -> [2 * E, 1, ...]`."""
        return jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), x)

    def init(params_key: jax.Array, actor_key: jax.Array, learner_key: jax.Array) -> tuple[Any, Players]:
        actor_key, key, their_key = jax.random.split(actor_key, 3)
        params, learner_state = learner.init(params_key, actor_key, learner_key)
        pool = Pool(
            params=jax.tree.map(lambda x: jnp.zeros((config.pool_size, *x.shape), x.dtype), params),
            filled=jnp.int32(0),
            slot=jnp.int32(0),
            wait=jnp.int32(0),
            drawn=jnp.full(config.num_opponents, -1, jnp.int32),
            key=key,
            actor_keys=jax.random.split(their_key, config.num_envs),
            standings=no_games(config.pool_size) if weighs else (),
        )
        return params, Players(learner_state, pool)

    @fragment(role="actor")
    def fill_pool(params, pool):
        is_due = pool.wait == 0
        replace_slot = lambda past, current: past.at[pool.slot].set(jnp.where(is_due, current, past[pool.slot]))
        filled = jnp.minimum(pool.filled + is_due.astype(pool.filled.dtype), config.pool_size)
        standings = pool.standings
        if weighs:
            standings = jax.lax.cond(is_due, lambda s: enter(s, pool.slot, filled), lambda s: s, standings)
        return pool._replace(
            params=jax.tree.map(replace_slot, pool.params, params),
            standings=standings,
            filled=filled,
            slot=(pool.slot + is_due) % config.pool_size,
            wait=jnp.where(is_due, config.pool_period, pool.wait) - 1,
        )

    @fragment(role="actor")
    def draw_opponents(params, pool):
        key, latest_key, slot_key = jax.random.split(pool.key, 3)
        latest = jax.random.bernoulli(latest_key, jnp.float32(config.latest_share), (config.num_opponents,))
        if weighs:
            past = draw_slots(pool.standings, slot_key, pool.filled, config.num_opponents)
        else:
            past = jax.random.randint(slot_key, (config.num_opponents,), 0, pool.filled, jnp.int32)
        slots = jnp.where(latest, -1, past)

        def pick(past: jax.Array, current: jax.Array) -> jax.Array:
            return jnp.where(latest.reshape(-1, *(1,) * current.ndim), current, past[slots])

        actor_keys, keys = split_keys(pool.actor_keys, config.unroll_length)
        pool = pool._replace(drawn=slots, key=key, actor_keys=actor_keys)
        return jax.tree.map(pick, pool.params, params), pool, keys

    def begin(params: PyTree, players: Players, progress: Progress) -> tuple[Any, Players, Any]:
        acting, learner_state, keys = learner.begin(params, players.learner, progress)
        opponents, pool, their_keys = draw_opponents(acting, fill_pool(acting, players.pool))
        return (acting, opponents), Players(learner_state, pool), (keys, their_keys)

    @fragment(role="actor")
    def play(acting, now, carry, keys):
        (params, opponents), (keys, their_keys) = acting, keys
        mine, extras, carry = learner.act(params, now._replace(obs=learner_part(now.obs)), carry, keys)
        their_now = now._replace(obs=seat_part(~is_first_seat, now.obs))
        choose = lambda params, now, keys: learner.act(params, now, carry, keys[:, None])[0]
        theirs = jax.vmap(choose, in_axes=(0, 1, 1), out_axes=1)(opponents, *group_by_opponent((their_now, their_keys)))
        actions = jnp.concatenate([mine, theirs.reshape(mine.shape)], axis=1)
        return jnp.concatenate([learner_part(actions), seat_part(~is_first_seat, actions)], axis=1), extras, carry

    # Rewards per episode end converge to the mean return, even if opponents change within episodes.
    @fragment(role="env")
    def score(reward, ended, drawn):
        is_against_pool = jnp.broadcast_to(drawn >= 0, (groups, config.num_opponents)).reshape(-1)
        return Mean(
            jnp.sum(reward[..., 0] * is_against_pool.astype(reward.dtype)), jnp.sum(ended * is_against_pool, dtype=jnp.float32)
        )

    @fragment(role="env")
    def score_each(reward, ended, drawn):
        slots = jnp.broadcast_to(drawn, (groups, config.num_opponents)).reshape(-1)
        is_its = slots == jnp.arange(config.pool_size)[:, None]
        own_reward = reward.reshape(config.unroll_length, config.num_envs).sum(0)
        total, games = is_its.astype(own_reward.dtype) * own_reward, is_its.astype(jnp.int32) * ended.sum(0, dtype=jnp.int32)
        return total.sum(-1), games.sum(-1).astype(jnp.float32)

    @fragment(role="actor")
    def keep_score(standings, total, games):
        return standings._replace(total=standings.total + total, games=standings.games + games)

    def learn(
        params: PyTree, players: Players, experience: Experience, now: Now, carry: PyTree, progress: Progress
    ) -> tuple[Any, Players, Metrics]:
        t = experience
        ended = t.truncated | t.terminated.all(-1)
        seats = jax.vmap(learner_part)(
            {f: getattr(t, f) for f in ("obs", "action", "reward", "terminated", "valid", "final_obs")}
        )
        params, learner_state, metrics = learner.learn(
            params, players.learner, t._replace(**seats), now._replace(obs=learner_part(now.obs)), carry, progress
        )
        if not is_constant(config.latest_share, 1):
            metrics = {**metrics, "return_against_pool": score(seats["reward"], ended, players.pool.drawn)}
        pool = players.pool
        if weighs:
            standings = keep_score(pool.standings, *score_each(seats["reward"], ended, pool.drawn))
            pool = pool._replace(standings=standings)
        return params, Players(learner_state, pool), metrics

    def choose_action(
        params: PyTree, players: Players, obs: PyTree, key: jax.Array | None, carry: PyTree
    ) -> tuple[jax.Array, PyTree]:
        action, _ = learner.choose_action(params, players.learner, seats_as_rows(obs), key, carry)
        return action.reshape(-1, 2, *action.shape[2:]), carry

    def probabilities(params: PyTree, players: Players, obs: PyTree) -> jax.Array:
        p = learner.probabilities(params, players.learner, seats_as_rows(obs))  # type: ignore[misc]
        return p.reshape(-1, 2, *p.shape[2:])

    replicated_axes = dict.fromkeys(("params", "filled", "slot", "wait", "drawn", "key", "standings"), P())
    pool = logical_axes(Pool, **replicated_axes, actor_keys=P("env"))
    return dataclasses.replace(
        learner,
        init=init,
        axes=(learner.axes[0], Players(learner.axes[1], pool)),
        begin=begin,
        act=play,
        learn=learn,
        choose_action=choose_action,
        probabilities=learner.probabilities and probabilities,
        env_group=config.num_opponents,
    )


def no_games(size: int) -> Standings:
    """Standings without any policy."""
    zero = jnp.zeros(size, jnp.float32)
    return Standings(jnp.zeros((size, size), jnp.float32), zero, zero, zero)


def enter(standings: Standings, slot: jax.Array, filled: jax.Array) -> Standings:
    """Adds the current policy, with its results, to the game in `slot` of `filled` entries; the next policy has no results."""
    size = standings.games.shape[0]
    row = jnp.where(standings.games > 0, standings.total / jnp.maximum(standings.games, 1), 0.0)
    payoff = standings.payoff.at[slot].set(row).at[:, slot].set(-row).at[slot, slot].set(0.0)
    is_filled = jnp.arange(size) < filled
    return no_games(size)._replace(payoff=payoff, weights=replicator_dynamics(payoff, is_filled))


def draw_slots(standings: Standings, key: jax.Array, filled: jax.Array, count: int) -> jax.Array:
    """Draws the slots of `count` opponents by their weights, a tenth of them uniformly. `[count]` int32"""
    is_filled = jnp.arange(standings.games.shape[0]) < filled
    probability = (1 - _EXPLORATION) * standings.weights + _EXPLORATION * is_filled / filled
    return jax.random.categorical(key, jnp.log(probability), shape=(count,)).astype(jnp.int32)


def replicator_dynamics(payoff: jax.Array, is_filled: jax.Array, rounds: int = _ROUNDS) -> jax.Array:
    """Returns an approximate equilibrium of a symmetric zero-sum game: probabilities `[K]`, 0 where `is_filled` is False.

    It is the mean over the rounds of discrete replicator dynamics, i.e. multiplicative weights (Freund and Schapire, 1999): the
    best response to it gains at most `sqrt(2 log(K) / rounds)` of the largest payoff. `payoff` is the row player's, `[K, K]`.
    """
    both_filled = is_filled[:, None] & is_filled
    scaled = jnp.where(both_filled, payoff / jnp.maximum(jnp.max(jnp.abs(payoff), initial=0.0, where=both_filled), 1e-8), 0.0)
    rate = jnp.sqrt(8 * jnp.log(jnp.maximum(is_filled.sum(), 2)) / rounds) / 2  # for payoffs from -1 to 1

    def step(logits: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        mixture = jax.nn.softmax(jnp.where(is_filled, logits, -jnp.inf))
        return logits + rate * (scaled @ mixture), mixture

    _, mixtures = jax.lax.scan(step, jnp.zeros(is_filled.shape, jnp.float32), None, length=rounds)
    return mixtures.mean(0)
