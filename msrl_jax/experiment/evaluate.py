"""Evaluation with greedy episodes: one whole episode per environment, so that short episodes do not count more often."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._checks import whole
from msrl_jax.envs import VectorEnvironment, has_agents, vectorize
from msrl_jax.envs.masks import check_played
from msrl_jax.envs.params import with_source
from msrl_jax.experiment.acting import Behavior
from msrl_jax.experiment.history import decimals
from msrl_jax.fragments.graph.host import host_errors
from msrl_jax.fragments.runtime.executables import Fitting

MAX_STEPS = 10_000


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The episodes of one evaluation.

    Attributes:
      returns: undiscounted sum of the raw rewards of every episode, of all agents. shape=[episodes] or [M, episodes],
        dtype=float32
      lengths: environment steps of every episode. shape=[episodes] or [M, episodes], dtype=int32
      finished: whether the episode ended (terminated or truncated) within `max_steps`; otherwise its return is the return of
        its first steps. shape=[episodes] or [M, episodes], dtype=bool
      agent_returns: the same sum for each of several agents; None for one agent. shape=[episodes, A] or [M, episodes, A],
        dtype=float32
      team_returns: name -> the sum over the agents of a team; empty unless there are several teams. shape=[episodes] or
        [M, episodes], dtype=float32
    """

    returns: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray
    agent_returns: np.ndarray | None = None
    team_returns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict[str, np.ndarray])

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
        """The columns of a history: `eval_return`, `eval_length`, and `eval_return/TEAM` of several teams."""
        teams = {f"eval_return/{team}": _mean(returns) for team, returns in self.team_returns.items()}
        return {"eval_return": self.mean_return, "eval_length": self.mean_length, **teams}

    def __repr__(self) -> str:
        parts = {f"of {team}": returns for team, returns in self.team_returns.items()}
        if self.agent_returns is not None and not parts:
            parts["of each agent"] = np.moveaxis(self.agent_returns, -1, -2)
        shown = "".join(f", {of} {_spread(returns)}" for of, returns in parts.items())
        cut = int((~self.finished).sum())
        note = f", {cut} cut off at max_steps" if cut else ""
        return (
            f"Evaluation({self.returns.shape[-1]} episodes: return {_spread(self.returns)}{shown}, "
            f"length {_fixed(self.mean_length, 1)}{note})"
        )


def _mean(values: np.ndarray) -> float | np.ndarray:
    mean = np.mean(values, axis=-1, dtype=np.float64)
    return mean if np.ndim(mean) else float(mean)


def _spread(returns: np.ndarray) -> str:
    mean, spread = _mean(returns), np.std(returns, axis=-1, dtype=np.float64)
    digits = decimals(mean, spread)
    return f"{_fixed(mean, digits)} ± {_fixed(spread, digits)}"


def _fixed(values: float | np.ndarray, digits: int) -> str:
    if not np.ndim(values):
        return f"{values:.{digits}f}"
    return f"[{', '.join(_fixed(value, digits) for value in np.asarray(values))}]"


class _Episodes(NamedTuple):
    """The episodes of an evaluation; `running` marks episodes that have not ended."""

    step: jax.Array
    env_state: Any
    obs: Any
    carry: Any
    agent_returns: Any
    returns: jax.Array
    lengths: jax.Array
    running: jax.Array


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Plays greedy episodes.

    Attributes:
      behavior: the behavior that plays.
      play: maps the leaves that `behavior.take` returns, and a key, to fields of an `Evaluation`.
      env: the environments that it plays in.
    """

    behavior: Behavior
    play: Fitting
    env: VectorEnvironment

    @property
    def teams(self) -> Mapping[str, tuple[int, ...]]:
        """The indices of the agents of each team, if there are several teams."""
        teams = getattr(self.behavior.agent.env, "teams", {})
        return teams if len(teams) > 1 else {}

    def begin(self, state: Any, key: jax.Array) -> None:
        """Has another thread compile the program for such a state and key."""
        self.play.begin(self.behavior.take(state), key)

    def __call__(self, state: Any, key: jax.Array) -> Evaluation:
        """Evaluates a run's state, on any devices, with a typed key (or keys `[M]`); changes nothing in `state`."""
        with host_errors():
            played = jax.device_get(self.play(self.behavior.take(state), key))
        check_played(self.behavior.env, played["returns"])
        teams = {team: played["agent_returns"][..., list(members)].sum(-1) for team, members in self.teams.items()}
        return Evaluation(**played, team_returns=teams)


def make_evaluator(behavior: Behavior, episodes: int, *, members: bool = False, max_steps: int = MAX_STEPS) -> Evaluator:
    """Makes an evaluator that plays greedy episodes in parallel on one device, each in an environment of its own.

    If `members`, states and keys have a leading dimension `M`. The evaluator compiles once. It raises ValueError before it runs
    if the episodes take more memory than the device has.
    """
    episodes, max_steps = whole("episodes", episodes), whole("max_steps", max_steps, most=2**31 - 1)
    copies, several = vectorize(behavior.env, episodes), has_agents(behavior.env)

    def play(leaves: list[jax.Array], key: jax.Array):
        state = behavior.restore(leaves)
        env = with_source(copies, behavior.source(state))
        env_state, obs = env.reset(key)

        def step(e: _Episodes) -> _Episodes:
            action, carry = behavior.act_with_carry(state, e.obs, e.carry)
            env_state, t = env.step(e.env_state, action)
            # The return of several agents is the sum of theirs, as in training.
            reward = t.reward.sum(-1) if several else t.reward
            agents = e.agent_returns + jnp.where(e.running[:, None], t.reward, 0.0) if several else ()
            # An environment starts another episode after its first, which does not count. So nothing resets its carry.
            return _Episodes(
                e.step + 1, env_state, t.obs, carry, agents, e.returns + jnp.where(e.running, reward, 0.0),
                e.lengths + e.running, e.running & ~t.ended,
            )  # fmt: skip

        zeros, agents = jnp.zeros(episodes), len(behavior.env.agents) if several else 0  # type: ignore[attr-defined]
        start = _Episodes(
            jnp.int32(0), env_state, obs, behavior.initial_carry(episodes), jnp.zeros((episodes, agents)) if several else (),
            zeros, zeros.astype(jnp.int32), jnp.ones(episodes, bool),
        )  # fmt: skip
        end = jax.lax.while_loop(lambda c: c.running.any() & (c.step < max_steps), step, start)
        played = {"returns": end.returns, "lengths": end.lengths, "finished": ~end.running}
        return played | {"agent_returns": end.agent_returns} if several else played

    fits = Fitting(
        jax.jit(jax.vmap(play) if members else play), f"an evaluation of {episodes:,} episodes at once",
        "Play fewer episodes; several evaluations with other seeds play as many in less memory",
    )  # fmt: skip
    return Evaluator(behavior, fits, copies)
