"""Self-play for games of two players whose rewards sum to zero: PPO against its own past.

In every environment, one seat is the learner's, and the other is an opponent's: the current parameters, or frozen ones from a
pool. Half of the environments have the learner in the first seat, half in the second. The pool keeps copies of past parameters;
a new one replaces the oldest. Opponents are drawn in every iteration, the current parameters with the probability
`latest_share`. A share of 1 is plain self-play, and 0.8 is OpenAI Five's (Berner et al., 2019, arXiv 1912.06680).

Without an entropy bonus, policies chase each other in circles, and only their average comes near an equilibrium. With one, the
current policy itself does: the larger the weight of the bonus, the faster, and the farther from the equilibrium it ends (Sokota
et al., 2022, arXiv 2206.05825; for PPO, Rudolph et al., 2025, arXiv 2502.08938). So the bonus is large, and advantages keep the
unit of the return, in which its weight counts.

With `opponents="payoff"` the pool is a population as in PSRO (Lanctot et al., 2017, arXiv 1711.00832): the returns of the
current parameters against each opponent fill a payoff matrix over pairs, whose equilibrium weighs the opponents.

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs`, `K` is `pool_size` and `G` is `num_opponents`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.base import Agent, Algorithm, Metrics, logical_axes, register
from msrl_jax.algorithms.configs.base import Tunable, is_constant
from msrl_jax.algorithms.configs.checks import check_integers, check_numbers
from msrl_jax.algorithms.ippo import IPPOConfig, make_team
from msrl_jax.algorithms.loops.acting import split_keys
from msrl_jax.algorithms.loops.agents import Experience, Now, Team, teams_agent
from msrl_jax.algorithms.loops.meta_game import draw, enter, no_games
from msrl_jax.envs import MultiAgentEnvironment, vectorize_agents
from msrl_jax.envs.base import env_name
from msrl_jax.fragments import fragment
from msrl_jax.metrics import Mean

_ONE_NETWORK = {"core": "none", "share_parameters": True, "agent_ids": False, "central_critic": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfPlayConfig(IPPOConfig):
    """What self-play computes: PPO of one feed-forward network that sees the observations of its seat.

    Attributes:
      pool_size: number of past parameters in the pool, `K`. Usual: 8 to 64.
      pool_period: iterations between two copies of the parameters into the pool. Usual: 1 to 100.
      latest_share: the probability that an opponent is the current parameters; else it is one of the pool. Usual: 0.5 to 1.
      opponents: "uniform" draws from the pool with equal probabilities, "payoff" with those of the equilibrium between the
        members of the pool. Usual: "uniform", or "payoff" for games in which policies beat each other in circles.
      num_opponents: opponents drawn per iteration, `G`; each plays in `num_envs / num_opponents` environments. Usual: 4 to 32.
      discount: discount factor per step. Usual: 1 for short games, else 0.99 to 0.999.
      entropy_coef: weight of the entropy bonus, in units of the return if advantages are not normalized. Usual: 0.05 to
        0.3 for returns near 1.
      normalize_advantage: whether advantages are standardized over each "minibatch", once over the whole "batch", or not
        ("none"). Usual: "none".
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`; constant if they are not given.
        Usual: True.
    """

    pool_size: int = 16
    pool_period: int = 10
    latest_share: Tunable = 0.8
    opponents: Literal["uniform", "payoff"] = "uniform"
    num_opponents: int = 8
    discount: Tunable = 1.0
    entropy_coef: Tunable = 0.15
    normalize_advantage: Literal["minibatch", "batch", "none"] = "none"
    anneal_learning_rate: bool = True

    def check_annealing(self) -> None:
        """Raises no error: the learning rate and the weight of the entropy are constant if `total_steps` is not given."""

    def check(self) -> None:
        """Raises ValueError unless the opponents fill the environments, and the network is one that self-play can freeze."""
        check_integers(self, 1, "pool_size", "pool_period", "num_opponents")
        check_numbers(self, "latest_share", low=0.0, high=1.0)
        for field, value in _ONE_NETWORK.items():
            if getattr(self, field) != value:
                why = "an opponent cannot take over the memory of another" if field == "core" else "both seats have one network"
                raise ValueError(f"{type(self).__name__}.{field}={getattr(self, field)!r}: {why}; use {value!r}")
        block = 2 * self.num_opponents
        if self.num_envs % block:
            raise ValueError(
                f"{type(self).__name__}.num_envs={self.num_envs} cannot be split into both seats against each of "
                f"num_opponents={self.num_opponents}; use num_envs={self.num_envs + -self.num_envs % block}, or a "
                "num_opponents that divides its half"
            )


class Pool(NamedTuple):
    """The opponents.

    Attributes:
      params: past parameters. shape=(K, ...)
      filled: how many there are. shape=(), dtype=int32
      slot: where the next ones go. shape=(), dtype=int32
      wait: iterations until then. shape=(), dtype=int32
      drawn: who plays in this iteration: a slot, or -1 for the current parameters. shape=(G,), dtype=int32
      key: the key that draws them. shape=()
      actor_keys: one key per environment, which samples the actions of the opponent. shape=(E,)
      standings: the game between them; `()` if they are drawn uniformly.
    """

    params: Any
    filled: jax.Array
    slot: jax.Array
    wait: jax.Array
    drawn: jax.Array
    key: jax.Array
    actor_keys: jax.Array
    standings: Any


class SelfPlay(NamedTuple):
    """What self-play keeps beside the parameters.

    Attributes:
      learner: what the learner's team keeps.
      pool: the opponents.
    """

    learner: Any
    pool: Pool


def play_itself(learner: Team, config: SelfPlayConfig) -> Team:
    """Makes a team of both players, of whom one learns, from a team of one agent.

    Args:
      learner: a feed-forward team of one agent.
      config: the settings of the algorithm.

    Returns:
      The team. Opponent `e % G` plays in environment `e`, and the learner has its first seat if `e // G` is even. So groups of
      `G` adjacent environments have all opponents; if none is split, opponents move nothing between devices.
    """
    groups = config.num_envs // config.num_opponents
    weighs = config.opponents == "payoff"
    is_first_seat = np.arange(config.num_envs) // config.num_opponents % 2 == 0

    def at(first: np.ndarray, x: Any) -> Any:
        """The first seat's part of `[E, 2, ...]` where `first`, else the second's. `[E, 1, ...]`."""

        def one(x: jax.Array) -> jax.Array:
            return jnp.where(first.reshape(-1, *(1,) * (x.ndim - 1)), x[:, :1], x[:, 1:])

        return jax.tree.map(one, x)

    def own(x: Any) -> Any:
        """The learner's part of `[E, 2, ...]`."""
        return at(is_first_seat, x)

    def grouped(x: Any) -> Any:
        """Splits environments by opponents: `[E, ...] -> [E / G, G, ...]`."""
        return jax.tree.map(lambda x: x.reshape(groups, config.num_opponents, *x.shape[1:]), x)

    def one_row_each(x: Any) -> Any:
        """Seats as rows of the one network: `[E, 2, ...] -> [2 * E, 1, ...]`."""
        return jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), x)

    def init(params_key: jax.Array, actor_key: jax.Array, learner_key: jax.Array) -> tuple[Any, SelfPlay]:
        params, rest = learner.init(params_key, actor_key, learner_key)
        key, their_key = jax.random.split(jax.random.fold_in(actor_key, 1))
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
        return params, SelfPlay(rest, pool)

    @fragment(role="actor")
    def fill_pool(params, pool):
        due = pool.wait == 0
        put = lambda past, new: past.at[pool.slot].set(jnp.where(due, new, past[pool.slot]))  # noqa: E731
        filled = jnp.minimum(pool.filled + due, config.pool_size)
        standings = pool.standings
        if weighs:
            standings = jax.lax.cond(due, lambda s: enter(s, pool.slot, filled), lambda s: s, standings)
        return pool._replace(
            params=jax.tree.map(put, pool.params, params),
            standings=standings,
            filled=filled,
            slot=(pool.slot + due) % config.pool_size,
            wait=jnp.where(due, config.pool_period, pool.wait) - 1,
        )

    @fragment(role="actor")
    def draw_opponents(params, pool):
        key, latest_key, slot_key = jax.random.split(pool.key, 3)
        latest = jax.random.bernoulli(latest_key, jnp.float32(config.latest_share), (config.num_opponents,))
        if weighs:
            past = draw(pool.standings, slot_key, pool.filled, config.num_opponents)
        else:
            past = jax.random.randint(slot_key, (config.num_opponents,), 0, pool.filled)
        drawn = jnp.where(latest, -1, past)

        def pick(past: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(latest.reshape(-1, *(1,) * new.ndim), new, past[drawn])

        actor_keys, keys = split_keys(pool.actor_keys, config.unroll_length)
        pool = pool._replace(drawn=drawn, key=key, actor_keys=actor_keys)
        return jax.tree.map(pick, pool.params, params), pool, keys

    def begin(params: Any, rest: SelfPlay) -> tuple[Any, SelfPlay, Any]:
        acting, kept, keys = learner.begin(params, rest.learner)
        opponents, pool, their_keys = draw_opponents(acting, fill_pool(acting, rest.pool))
        return (acting, opponents), SelfPlay(kept, pool), (keys, their_keys)

    @fragment(role="actor")
    def play(acting, now, carry, keys):
        (params, opponents), (keys, their_keys) = acting, keys
        mine, extras, carry = learner.act(params, now._replace(obs=own(now.obs)), carry, keys)
        seen = now._replace(obs=at(~is_first_seat, now.obs))
        choose = lambda params, now, keys: learner.act(params, now, carry, keys[:, None])[0]  # noqa: E731
        theirs = jax.vmap(choose, in_axes=(0, 1, 1), out_axes=1)(opponents, *grouped((seen, their_keys)))
        both = jnp.concatenate([mine, theirs.reshape(mine.shape)], axis=1)
        return jnp.concatenate([own(both), at(~is_first_seat, both)], axis=1), extras, carry

    # Rewards per end of an episode are the mean return in the long run, also if opponents change within episodes.
    @fragment(role="env")
    def score(reward, ended, drawn):
        old = jnp.broadcast_to(drawn >= 0, (groups, config.num_opponents)).reshape(-1)
        return Mean(jnp.sum(reward[..., 0] * old), jnp.sum(ended * old, dtype=jnp.float32))

    @fragment(role="env")
    def score_each(reward, ended, drawn):
        slots = jnp.broadcast_to(drawn, (groups, config.num_opponents)).reshape(-1)
        is_its = slots == jnp.arange(config.pool_size)[:, None]
        own_reward = reward.reshape(config.unroll_length, config.num_envs).sum(0)
        return (is_its * own_reward).sum(-1), (is_its * ended.sum(0)).sum(-1).astype(jnp.float32)

    @fragment(role="actor")
    def keep_score(standings, total, games):
        return standings._replace(total=standings.total + total, games=standings.games + games)

    def learn(params: Any, rest: SelfPlay, experience: Experience, now: Now, carry: Any) -> tuple[Any, SelfPlay, Metrics]:
        t = experience
        ended = t.truncated | t.terminated.all(-1)
        seats = jax.vmap(own)({f: getattr(t, f) for f in ("obs", "action", "reward", "terminated", "present", "final_obs")})
        params, kept, metrics = learner.learn(
            params, rest.learner, t._replace(**seats), now._replace(obs=own(now.obs)), carry
        )
        if not is_constant(config.latest_share, 1):
            metrics = {**metrics, "return_against_pool": score(seats["reward"], ended, rest.pool.drawn)}
        pool = rest.pool
        if weighs:
            standings = keep_score(pool.standings, *score_each(seats["reward"], ended, pool.drawn))
            pool = pool._replace(standings=standings)
        return params, SelfPlay(kept, pool), metrics

    def choose_action(params: Any, rest: SelfPlay, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
        action, _ = learner.choose_action(params, rest.learner, one_row_each(obs), key, carry)
        return action.reshape(-1, 2, *action.shape[2:]), carry

    def probabilities(params: Any, rest: SelfPlay, obs: Any) -> jax.Array:
        p = learner.probabilities(params, rest.learner, one_row_each(obs))  # type: ignore[misc]
        return p.reshape(-1, 2, *p.shape[2:])

    whole = dict.fromkeys(("params", "filled", "slot", "wait", "drawn", "key", "standings"), P())
    pool = logical_axes(Pool, **whole, actor_keys=P("env"))
    return dataclasses.replace(
        learner,
        init=init,
        axes=(learner.axes[0], SelfPlay(learner.axes[1], pool)),
        begin=begin,
        act=play,
        learn=learn,
        choose_action=choose_action,
        probabilities=learner.probabilities and probabilities,
        env_group=config.num_opponents,
    )


def build(env: MultiAgentEnvironment, config: SelfPlayConfig) -> Agent:
    """Builds self-play for a game of two players.

    Args:
      env: the environment of two agents; its action space is `Discrete`, or a `Box` of floats or of integers.
      config: the settings of the algorithm.

    Returns:
      The agent: both players of the current policy.

    Raises:
      ValueError: if the environment has not two agents, or if the network does not fit.
      TypeError: if a space is not supported, or a result of the environment does not fit the protocol.
    """
    if len(env.agents) != 2:
        raise ValueError(
            f"self_play is for two players, but environment {env_name(env)!r} has {len(env.agents)} agents; use ippo or mappo"
        )
    venv = vectorize_agents(env, config.num_envs)
    team = play_itself(make_team(venv, 1, config), config)
    agent = teams_agent(venv, {"agents": team}, unroll_length=config.unroll_length)
    return dataclasses.replace(agent, ranked=False)  # the sum of both returns is 0


SELF_PLAY = register(Algorithm("self_play", SelfPlayConfig, build, many_agents=True))
