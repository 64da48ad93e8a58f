"""The training loop of several agents: teams that act in the same environments, each with its own algorithm.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `A` the number of agents of a
team and `S` the length of a global state.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics, Progress, RolloutFields, logical_axes
from msrl_jax.envs import MultiAgentEnvironment, VectorizedAgents, vectorize_agents
from msrl_jax.envs.actions import action_transform
from msrl_jax.fragments import fragment, fragment_scope


class Experience(NamedTuple):
    """The experience of a team in an unroll."""

    obs: Any  # for every action, [T, E, A, ...]
    state: jax.Array  # the global states, [T, E, S]
    is_first: jax.Array  # whether an observation is the first of an episode, [T, E]
    action: jax.Array  # before `action_transform`, [T, E, A, ...]
    extras: Any  # other outputs of `Team.act`
    reward: jax.Array  # [T, E, A]
    terminated: jax.Array  # whether the agent has terminated, [T, E, A]
    truncated: jax.Array  # whether the episode was cut short, [T, E]
    valid: jax.Array  # valid steps: whether the agent was in the episode when it acted, [T, E, A]
    final_obs: Any  # the true next observations, before any reset, [T, E, A, ...]
    final_state: jax.Array  # their global states, [T, E, S]


class Now(NamedTuple):
    """The inputs of a team before it acts."""

    obs: Any  # [E, A, ...]
    state: jax.Array  # the global states, [E, S]
    is_first: jax.Array  # whether they are the first of an episode, [E]


@dataclasses.dataclass(frozen=True)
class Team:
    """An algorithm for a team of agents, as functions that call fragments; the method `build_team` of a config makes it."""

    # (params_key, actor_key, learner_key) -> (params, team_state), which has all other state: optimizer states, keys and so on
    init: Callable[[jax.Array, jax.Array, jax.Array], tuple[Any, Any]]
    axes: tuple[Any, Any]  # logical axes of params and team_state
    # (params, team_state, progress) -> (acting, team_state, keys [T, ...]); `acting` are inputs of `act`, such as parameters
    begin: Callable[[Any, Any, Progress], tuple[Any, Any, Any]]
    # (acting, now, carry, keys) -> (action [E, A, ...], extras, carry)
    act: Callable[..., tuple[jax.Array, Any, Any]]
    # (params, team_state, experience, now, carry, progress) -> (params, team_state, metrics); `now` is after it, `carry` before
    learn: Callable[..., tuple[Any, Any, Metrics]]
    # (params, team_state, obs [E, A, ...], key, carry) -> (action [E, A, ...], carry)
    choose_action: Callable[..., tuple[jax.Array, Any]]
    initial_carry: Callable[[int], Any]  # num_envs -> carry [E, A, ...], an empty pytree for networks without a core
    updates_per_iteration: int  # the largest number of gradient steps
    agent_axes: P  # of its arrays [E, A, ...]: P("env", "agent") if every agent has its own network
    # (params, team_state, obs [E, A, ...]) -> probabilities [E, A, N]; None if the policy is not categorical, or is recurrent
    probabilities: Callable[[Any, Any, Any], jax.Array] | None = None
    env_group: int = 1  # size of a group of adjacent environments that must be on one device
    learning_starts: int = 0  # environment steps that a replay buffer must hold before the first update


class TeamsState(NamedTuple):
    """The state of a run; mappings have one entry for each team."""

    params: dict[str, Any]
    teams: dict[str, Any]  # the other state of the teams
    carry: dict[str, Any]  # the carries of the teams, [E, A, ...]
    env_state: Any
    now: dict[str, Now]


def teams_agent(venv: VectorizedAgents, teams: Mapping[str, Team], *, unroll_length: int) -> Agent:
    """Builds the agent of a run with several agents; with several teams, metrics are named `METRIC/TEAM`."""
    everyone = tuple(range(venv.num_agents))
    members = {name: venv.teams.get(name, everyone) for name in teams}
    to_env_action = action_transform(venv.action_space)

    def together(parts: Mapping[str, jax.Array]) -> jax.Array:
        """Combines the arrays of the teams into an array of all agents `[E, A, ...]`."""
        if len(parts) == 1:
            return next(iter(parts.values()))
        order = np.argsort([i for name in parts for i in members[name]])
        return jnp.concatenate(list(parts.values()), axis=1)[:, order]

    def joint_action(actions: Mapping[str, jax.Array]) -> jax.Array:
        return together({name: to_env_action(action) for name, action in actions.items()})

    def select_team(name: str, x: Any) -> Any:
        """Selects the agents of a team from `[E, A, ...]`."""
        return x if members[name] == everyone else jax.tree.map(lambda x: x[:, np.array(members[name])], x)

    def scope(name: str):
        return fragment_scope(name if len(teams) > 1 else "")

    def team_inputs(obs: Any, state: jax.Array, is_first: jax.Array) -> dict[str, Now]:
        return {name: Now(select_team(name, obs), state, is_first) for name in teams}

    def init(key: jax.Array) -> TeamsState:
        # A single team gets the same keys as a single-agent algorithm, so that a team of one agent trains identically.
        keys = jax.random.split(key, (len(teams), 4))
        env_state, obs = venv.reset(keys[0][1])
        initial = {name: team.init(k[0], k[2], k[3]) for (name, team), k in zip(teams.items(), keys, strict=True)}
        return TeamsState(
            params={name: params for name, (params, _) in initial.items()},
            teams={name: team_state for name, (_, team_state) in initial.items()},
            carry={name: team.initial_carry(venv.num_envs) for name, team in teams.items()},
            env_state=env_state,
            now=team_inputs(obs, venv.global_state(env_state, obs), jnp.ones(venv.num_envs, bool)),
        )

    @fragment(role="env")
    def env_step(env_state, actions):
        env_state, t = venv.step(env_state, joint_action(actions))
        per_agent = {field: getattr(t, field) for field in ("reward", "terminated", "valid", "final_obs")}
        outcome = {"truncated": t.truncated, "final_state": t.final_state}
        return env_state, team_inputs(t.obs, t.state, t.ended), {n: select_team(n, per_agent) | outcome for n in teams}

    pop_episodes = fragment(role="env", name="pop_episodes")(venv.pop_episodes)

    def iteration(state: TeamsState, progress: Progress) -> tuple[TeamsState, Metrics]:
        def step(carried, keys):
            env_state, now, carry = carried
            outputs = {}
            for n, team in teams.items():
                with scope(n):
                    outputs[n] = team.act(acting[n], now[n], carry[n], keys[n])
            env_state, next_now, outcome = env_step(env_state, {n: action for n, (action, _, _) in outputs.items()})
            experience = {
                n: Experience(**now[n]._asdict(), action=action, extras=extras, **outcome[n])
                for n, (action, extras, _) in outputs.items()
            }
            return (env_state, next_now, {n: carry for n, (_, _, carry) in outputs.items()}), experience

        acting, team_states, keys = {}, {}, {}
        for name, team in teams.items():
            with scope(name):
                acting[name], team_states[name], keys[name] = team.begin(state.params[name], state.teams[name], progress)
        start = state.env_state, state.now, state.carry
        (env_state, now, carry), experience = jax.lax.scan(step, start, keys, length=unroll_length)
        env_state, episodes = pop_episodes(env_state)
        params, new_states, metrics = {}, {}, {}
        for name, team in teams.items():
            with scope(name):
                params[name], new_states[name], stats = team.learn(
                    state.params[name], team_states[name], experience[name], now[name], state.carry[name], progress
                )
            metrics |= {metric + f"/{name}" * (len(teams) > 1): value for metric, value in stats.items()}
        return TeamsState(params, new_states, carry, env_state, now), {**metrics, **episodes}

    def act(state: TeamsState, obs: Any, key: jax.Array | None, carry: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        actions, carries = {}, {}
        keys = [key] * len(teams) if key is None or len(teams) == 1 else jax.random.split(key, len(teams))
        for team_key, (name, team) in zip(keys, teams.items(), strict=True):
            actions[name], carries[name] = team.choose_action(
                state.params[name], state.teams[name], select_team(name, obs), team_key, carry[name]
            )
        return joint_action(actions), carries

    def probabilities(state: TeamsState, obs: Any) -> jax.Array:
        return together(
            {
                name: team.probabilities(state.params[name], state.teams[name], select_team(name, obs))
                for name, team in teams.items()
                if team.probabilities is not None
            }
        )

    agent_axes = {name: team.agent_axes for name, team in teams.items()}
    axes = logical_axes(
        TeamsState,
        params={name: team.axes[0] for name, team in teams.items()},
        teams={name: team.axes[1] for name, team in teams.items()},
        carry=agent_axes,
        env_state=venv.axes,
        now={name: Now(axes, P("env"), P("env")) for name, axes in agent_axes.items()},  # type: ignore[arg-type]
    )
    return Agent(
        init=init,
        iteration=iteration,
        act=act,
        axes=axes,
        steps_per_iteration=venv.num_envs * unroll_length,
        updates_per_iteration=max(team.updates_per_iteration for team in teams.values()),
        env=venv,  # type: ignore[arg-type]
        initial_carry=lambda num_envs: {name: team.initial_carry(num_envs) for name, team in teams.items()},
        ranked=len(teams) == 1,
        learning_starts=max(team.learning_starts for team in teams.values()),
        env_group=math.lcm(*(team.env_group for team in teams.values())),
        probabilities=None if any(team.probabilities is None for team in teams.values()) else probabilities,
    )


class TeamFields(RolloutFields, Protocol):
    """The config of an algorithm for teams of agents."""

    def build_team(self, venv: VectorizedAgents, num_agents: int) -> Team:
        """Builds a team of `num_agents` agents."""
        ...


def agent_of(config: TeamFields, env: MultiAgentEnvironment) -> Agent:
    """Builds the agent of a config whose method `build_team` makes one team of all agents of an environment."""
    venv = vectorize_agents(env, config.num_envs)
    return teams_agent(venv, {"agents": config.build_team(venv, venv.num_agents)}, unroll_length=config.unroll_length)
