"""Acting outside the training loop, and evaluation: one greedy episode per environment, so that each short one counts once."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import Tracer
from msrl_jax.agents.agent import Agent, innermost
from msrl_jax.envs import Environment, MaskedObservation, VectorEnvironment, episode_metrics, has_agents, vectorize
from msrl_jax.envs.base import PyTree, TimeStep, env_name
from msrl_jax.envs.episode_metrics import EpisodeMetrics, metrics_of
from msrl_jax.envs.masks import check_returns_not_nan, mask_of, observation_type
from msrl_jax.envs.param_sources import find_source, is_of_source, with_source
from msrl_jax.envs.params import GivenParams, ParamSampler, RandomizeParams, randomized
from msrl_jax.fragments.graph.host_calls import host_errors
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.runtime.executables import MemoryCheckedJit
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.random_keys import is_key
from msrl_jax.run import processes
from msrl_jax.run.evaluation.history import decimals

MAX_STEPS = 10_000
MOST_SHOWN = 4  # the largest number of environment metrics in a line of text


@dataclasses.dataclass(frozen=True)
class Behavior:
    """The behavior of an agent on raw observations.

    A state may be large (replay buffers) and on several meshes, but acting needs only a small part of it. `take` copies this
    part to one device, and `act_with_carry` computes actions from it.
    """

    agent: Agent  # the agent of one run
    env: Environment
    follows_state: bool = (
        True  # whether environment parameters are drawn from the distributions in a state, or from those of `env`
    )

    def with_env_params(self, env_params: GivenParams | None) -> "Behavior":
        """Returns the behavior with other distributions of environment parameters: the defaults if empty, the same if None."""
        if env_params is None:
            return self
        env = self.env.env if isinstance(self.env, RandomizeParams) else self.env
        return dataclasses.replace(self, env=randomized(env, env_params), follows_state=False)

    def source(self, state: PyTree) -> ParamSampler | tuple[()]:
        """Returns the current distributions of environment parameters in a state of one run; `()` for those of `env`."""
        return jax.tree.map(lambda x: x[0], find_source(state)) if self.follows_state else ()

    def initial_carry(self, num_envs: int) -> PyTree:
        """Returns the carry at the start of an episode: a pytree of arrays `[E, ...]`, empty unless the agent is recurrent."""
        return self.agent.initial_carry(num_envs)

    def act_with_carry(
        self, state: PyTree, obs: PyTree, carry: PyTree, key: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        """Chooses actions for raw observations, both `[E, ...]`; returns the actions and the carry for the next step. At the
        start of an episode, pass `initial_carry`. If the key is None, takes the most probable actions."""
        return self.agent.act(state, self.agent.env.observe(innermost(state).env_state, obs), key, carry)

    def probabilities(self, state: PyTree, obs: PyTree) -> jax.Array:
        """Returns the probabilities of discrete actions, or of the values of each integer in an action."""
        if self.agent.is_recurrent:
            raise ValueError(
                "the probabilities of a recurrent agent depend on earlier observations, not on one alone; sample its "
                "actions with act_with_carry"
            )
        if self.agent.probabilities is None:
            raise ValueError("the policy of this agent is not categorical, so actions have no probabilities; use act")
        return self.agent.probabilities(state, self.agent.env.observe(innermost(state).env_state, obs))

    def batched(self, obs: PyTree) -> tuple[PyTree, bool]:
        """Checks raw observations; returns them as a batch, and whether they were a single observation."""
        kind = self.observation_type
        if isinstance(kind, MaskedObservation) != isinstance(obs, MaskedObservation):
            raise ValueError(
                f"{env_name(self.env)} has an action mask; pass it with the observation: "
                "act(msrl_jax.envs.MaskedObservation(obs, action_mask))"
                if isinstance(kind, MaskedObservation)
                else f"{env_name(self.env)} has no action mask; pass the observation without one"
            )
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(obs)):
            raise TypeError(
                "act and probabilities of a result run on the host, and cannot be traced by jax.jit, vmap or grad; give them a "
                "batch of observations, or trace result.behavior.act_with_carry(result.state, obs, carry, key)"
            )
        obs = jax.tree.map(lambda t, x: np.asarray(x, t.dtype), kind, obs)
        shapes, expected = ([x.shape for x in jax.tree.leaves(t)] for t in (obs, kind))
        single = shapes == expected
        if not single and [s[1:] for s in shapes] != expected:
            raise ValueError(f"obs has shape {shapes}; the environment's observations have shape {expected}, or [B, ...]")
        if not single and len({s[0] for s in shapes} | {0}) != 2:
            raise ValueError(f"obs has shape {shapes}; give a batch of at least one observation, of equal length in all parts")
        if single:
            obs = jax.tree.map(lambda x: x[None], obs)
        if (mask := mask_of(obs)) is not None and not mask.any(-1).all():
            number = np.argwhere(~mask.any(-1))[0].tolist()
            raise ValueError(f"observation {number} has no legal action; leave it out, or correct its action_mask")
        return obs, single

    def checked_carry(self, carry: PyTree, count: int) -> PyTree:
        """Checks the carry for a number of observations; None becomes the carry at the start of an episode."""
        fresh = self.initial_carry(count)
        carry = fresh if carry is None else carry
        shapes, expected = (jax.tree.map(np.shape, c) for c in (carry, fresh))
        if shapes != expected:
            raise ValueError(
                f"carry has shapes {shapes}; the carry of {count} observations has shapes {expected}. Pass the carry that the "
                "last call returned, or None at the start of an episode"
            )
        return carry

    @functools.cached_property
    def state_type(self) -> PyTree:
        """The state of one run as a pytree of `jax.ShapeDtypeStruct`."""
        return jax.eval_shape(lambda: self.agent.with_data(self.agent.init(jax.random.key(0))))

    @functools.cached_property
    def observation_type(self) -> PyTree:
        """A single raw observation as a pytree of `jax.ShapeDtypeStruct`."""
        return observation_type(self.env)

    @functools.cached_property
    def _is_needed(self) -> tuple[bool, ...]:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), self.observation_type)
        carry = self.initial_carry(1)

        def both_ways(state: PyTree, batch: PyTree) -> PyTree:
            return [self.act_with_carry(state, batch, carry, key) for key in (None, jax.random.key(0))]

        jaxpr = jax.make_jaxpr(both_ways)(self.state_type, batch).jaxpr
        read_vars = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
        sources = is_of_source(self.state_type)  # an environment in which the agent acts draws its parameters from them
        return tuple(
            id(v) in read_vars or is_source for v, is_source in zip(jaxpr.invars[: len(sources)], sources, strict=True)
        )

    def take(self, state: PyTree, device: Device | None = None) -> list[jax.Array]:
        """Copies the leaves of `state` that acting needs to one device."""
        flat = jax.tree.leaves(state)
        if any(self._is_needed[len(flat) :]):  # the algorithm's own state, without the numbers of its member
            raise ValueError("the agent acts by numbers of its config in which members differ; use result.act(obs, member=...)")
        leaves = processes.to_hosts([leaf for leaf, is_needed in zip(flat, self._is_needed, strict=False) if is_needed])
        if device is None:
            at_hand = bool(leaves) and jax.process_count() == 1
            device = leaves[0].addressable_shards[0].device if at_hand else jax.local_devices()[0]
        return jax.device_put(leaves, device)

    @property
    def leaf_types(self) -> list[jax.ShapeDtypeStruct]:
        """The leaves of one run that `take` copies."""
        return [t for t, is_needed in zip(jax.tree.leaves(self.state_type), self._is_needed, strict=True) if is_needed]

    def restore(self, leaves: list[jax.Array]) -> PyTree:
        """Rebuilds a state from the leaves that `take` returned; the other leaves are zeros. Call it under `jit`."""

        def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.broadcast_to(jax.random.key(0), leaf.shape) if is_key(leaf) else jnp.zeros(leaf.shape, leaf.dtype)

        leaf_iterator, (types, tree) = iter(leaves), jax.tree.flatten(self.state_type)
        pairs = zip(types, self._is_needed, strict=True)
        return jax.tree.unflatten(tree, [next(leaf_iterator) if is_needed else zeros(t) for t, is_needed in pairs])


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The episodes of one evaluation.

    Attributes:
      returns: undiscounted sum of the raw rewards of each episode, over all agents. shape=[episodes] or [M, episodes],
        dtype=float32
      lengths: environment steps of each episode. shape=[episodes] or [M, episodes], dtype=int32
      finished: whether the episode ended (terminated or truncated) within `max_steps`; otherwise its return is that of its
        first steps. shape=[episodes] or [M, episodes], dtype=bool
      agent_returns: the same sum for each of several agents; None for one agent. shape=[episodes, A] or [M, episodes, A],
        dtype=float32
      team_returns: name -> the sum over the agents of a team; empty unless there are several teams. shape=[episodes] or
        [M, episodes], dtype=float32
      metrics: name -> the metric of the environment over each episode, or its first steps. shape=[episodes] or [M, episodes],
        dtype=float32
    """

    returns: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray
    agent_returns: np.ndarray | None = None
    team_returns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict[str, np.ndarray])
    metrics: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict[str, np.ndarray])

    @property
    def mean_return(self) -> float | np.ndarray:
        """Mean return over the episodes; an array `[M]` for `M` members."""
        return _mean(self.returns)

    @property
    def mean_length(self) -> float | np.ndarray:
        """Mean length over the episodes; an array `[M]` for `M` members."""
        return _mean(self.lengths)

    @property
    def means(self) -> dict[str, float | np.ndarray]:
        """Columns for a history: `eval_return`, `eval_length`, `eval_METRIC`, and with several teams, `eval_return/TEAM`."""
        teams = {f"eval_return/{team}": _mean(returns) for team, returns in self.team_returns.items()}
        metrics = {f"eval_{name}": _mean(values) for name, values in self.metrics.items()}
        return {"eval_return": self.mean_return, "eval_length": self.mean_length, **teams, **metrics}

    def __repr__(self) -> str:
        parts = {f"of {team}": returns for team, returns in self.team_returns.items()}
        if self.agent_returns is not None and not parts:
            parts["of each agent"] = np.moveaxis(self.agent_returns, -1, -2)
        teams = "".join(f", {owner} {_format_mean(returns)}" for owner, returns in parts.items())
        unfinished = int((~self.finished).sum())
        metrics = "".join(f", {name} {_format_mean(values)}" for name, values in list(self.metrics.items())[:MOST_SHOWN])
        metrics += ", ..." * (len(self.metrics) > MOST_SHOWN)
        note = f", {unfinished} cut off at max_steps" if unfinished else ""
        return (
            f"Evaluation({self.returns.shape[-1]} episodes: return {_format_mean(self.returns)}{teams}, "
            f"length {_format(self.mean_length, 1)}{metrics}{note})"
        )


def _mean(values: np.ndarray) -> float | np.ndarray:
    mean = np.mean(values, axis=-1, dtype=np.float64)
    return mean if np.ndim(mean) else float(mean)


def _format_mean(returns: np.ndarray) -> str:
    mean, spread = _mean(returns), np.std(returns, axis=-1, dtype=np.float64)
    digits = decimals(mean, spread)
    return f"{_format(mean, digits)} ± {_format(spread, digits)}"


def _format(values: float | np.ndarray, digits: int) -> str:
    if not np.ndim(values):
        return f"{values:.{digits}f}"
    return f"[{', '.join(_format(value, digits) for value in np.asarray(values))}]"


class _Episodes(NamedTuple):
    """The episodes of an evaluation; `running` marks the episodes that have not ended."""

    step: jax.Array
    env_state: PyTree
    obs: PyTree
    carry: PyTree
    agent_returns: Any  # () for one agent
    returns: jax.Array
    lengths: jax.Array
    running: jax.Array
    metrics: EpisodeMetrics | tuple[()]


def _to_device_of(key: jax.Array, leaves: list[jax.Array]) -> jax.Array:
    """Copies a key to the device of leaves."""
    return jax.device_put(key, leaves[0].sharding) if leaves else key


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Plays greedy episodes."""

    behavior: Behavior
    play: MemoryCheckedJit  # maps the leaves that `behavior.take` returns, and a key, to fields of an `Evaluation`
    env: VectorEnvironment  # the environments to play in

    @property
    def teams(self) -> Mapping[str, tuple[int, ...]]:
        """The indices of the agents of each team, if there are several teams."""
        teams = getattr(self.behavior.agent.env, "teams", {})
        return teams if len(teams) > 1 else {}

    def begin(self, state: PyTree, key: jax.Array) -> None:
        """Starts to compile the program for such a state and key in another thread."""
        leaves = self.behavior.take(state)
        self.play.begin(leaves, _to_device_of(key, leaves))

    def __call__(self, state: PyTree, key: jax.Array) -> Evaluation:
        """Evaluates a run's state, on any devices, with a typed key (or keys `[M]`); does not change `state`."""
        return self.evaluate_leaves(self.behavior.take(state), key)

    def evaluate_leaves(self, leaves: list[jax.Array], key: jax.Array) -> Evaluation:
        """Evaluates the leaves that `Behavior.take` returned."""
        with host_errors():
            played = jax.device_get(self.play(leaves, _to_device_of(key, leaves)))
        check_returns_not_nan(self.behavior.env, played["returns"])
        teams = {team: played["agent_returns"][..., list(members)].sum(-1) for team, members in self.teams.items()}
        values = played.pop("metrics", None)
        metrics = {name: values[..., k] for k, name in enumerate(metrics_of(self.env))}
        return Evaluation(**played, team_returns=teams, metrics=metrics)


def make_evaluator(behavior: Behavior, episodes: int, *, members: bool = False, max_steps: int = MAX_STEPS) -> Evaluator:
    """Makes an evaluator that plays greedy episodes in parallel on one device, each in a separate environment.

    If `members`, states and keys have a leading dimension `M`. The evaluator compiles once.
    """
    episodes, max_steps = whole("episodes", episodes), whole("max_steps", max_steps, most=2**31 - 1)
    copies, several = vectorize(behavior.env, episodes), has_agents(behavior.env)

    def play(leaves: list[jax.Array], key: jax.Array):
        state = behavior.restore(leaves)
        env = with_source(copies, behavior.source(state))
        env_state, obs = env.reset(key)

        def counted(e: _Episodes, t: TimeStep) -> jax.Array:
            is_answered = None if several else episode_metrics.answered(t)
            return e.running if is_answered is None else e.running & is_answered

        def without_lost(e: _Episodes, t: Any) -> _Episodes:
            """Restarts episodes that simulators lost (truncated without an answer); training does not count them either."""
            lost = e.running & t.truncated & ~t.terminated & ~t.valid
            keep = lambda fresh, x: jnp.where(lost.reshape(-1, *(1,) * (x.ndim - 1)), fresh, x)
            carry = jax.tree.map(keep, behavior.initial_carry(episodes), e.carry)
            zeros = [jax.tree.map(lambda x: keep(jnp.zeros_like(x), x), x) for x in (e.returns, e.lengths, e.metrics)]
            return e._replace(carry=carry, **dict(zip(("returns", "lengths", "metrics"), zeros, strict=True)))

        def step(e: _Episodes) -> _Episodes:
            action, carry = behavior.act_with_carry(state, e.obs, e.carry)
            env_state, t = env.step(e.env_state, action)
            # The return of several agents is the sum of their returns, as in training.
            reward = t.reward.sum(-1) if several else t.reward
            agents = e.agent_returns + jnp.where(e.running[:, None], t.reward, 0.0) if several else ()
            valid = None if several else t.valid  # steps may lack an answer
            counts = e.running if valid is None else e.running & valid
            episode_ended = t.ended if valid is None else t.ended & (valid | t.terminated)
            # After its first episode, an environment starts another one, which does not count. So the carry is never reset.
            episodes_after = _Episodes(
                e.step + 1,
                env_state,
                t.obs,
                carry,
                agents,
                e.returns + jnp.where(e.running, reward, 0.0),
                e.lengths + counts,
                e.running & ~episode_ended,
                episode_metrics.add(env, e.metrics, t.metrics, counted(e, t)),
            )
            return episodes_after if valid is None else without_lost(episodes_after, t)

        zeros, agents = jnp.zeros(episodes), len(behavior.env.agents) if several else 0  # type: ignore[attr-defined]
        start = _Episodes(
            jnp.int32(0),
            env_state,
            obs,
            behavior.initial_carry(episodes),
            jnp.zeros((episodes, agents)) if several else (),
            zeros,
            zeros.astype(jnp.int32),
            jnp.ones(episodes, bool),
            episode_metrics.begin(env, episodes),
        )
        end = jax.lax.while_loop(lambda c: c.running.any() & (c.step < max_steps), step, start)
        played = {"returns": end.returns, "lengths": end.lengths, "finished": ~end.running}
        played |= {"metrics": episode_metrics.so_far(env, end.metrics)} if end.metrics else {}
        return played | {"agent_returns": end.agent_returns} if several else played

    checked_play = MemoryCheckedJit(
        jax.jit(jax.vmap(play) if members else play),
        f"an evaluation of {episodes:,} episodes at once",
        "Play fewer episodes; several evaluations with other seeds need less memory for the same number",
    )
    return Evaluator(behavior, checked_play, copies)
