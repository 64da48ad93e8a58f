"""Several teams in one environment, each with its own algorithm, trained simultaneously."""

import dataclasses
import fnmatch
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics, Progress, split_keys
from msrl_jax.agents.transformations import scheduled
from msrl_jax.configs.classes import fields_of
from msrl_jax.configs.config import config, field
from msrl_jax.configs.deferred import is_object
from msrl_jax.configs.options import write_value
from msrl_jax.envs import MultiAgentEnvironment, VectorizedAgents, vectorize_agents
from msrl_jax.envs.actions import uniform_actions
from msrl_jax.envs.base import env_name
from msrl_jax.fragments import fragment
from msrl_jax.fragments.support.checks import suggestion
from msrl_jax.fragments.support.naming import reference
from msrl_jax.loops.teams import Experience, Now, Team, teams_agent
from msrl_jax.networks.policy_heads import check_policy_space
from msrl_jax.registry import files, resolve
from msrl_jax.registry.lookup import get, make
from msrl_jax.registry.table import ALGORITHMS
from msrl_jax.registry.team_text import read_algorithm, split_team, write_agents

RANDOM = "random"
"""The algorithm of a team that takes uniformly random legal actions, and learns nothing."""


_SHARED = ("num_envs", "unroll_length")
"""Fields that all teams share."""


@config("teams", multi_agent=True)
class Teams:
    """Several teams in one environment: `Teams(teams={"adversary": MAPPO(learning_rate=7e-4), "agent": "ippo"})`.

    Whatever form they are given in, `teams` holds one text for each team: its fields that are not the defaults.
    """

    num_envs: int = field(default=64, doc="environments stepped in parallel, `E`. Usual: 8 to 4096.")
    unroll_length: int = field(default=32, doc="steps of every environment per iteration, `T`. Usual: 16 to 128.")
    teams: Mapping[str, Any] | tuple[str, ...] = field(
        default=(),
        doc='`TEAM=ALGORITHM:field=value,...` each; the algorithm may be "random". Its agents are those whose names begin '
        "with TEAM, or fit the field `agents`, such as `agents=ally_*|medic`. Usual: adversary=mappo agent=ippo.",
    )

    def check(self) -> None:
        """Raises ValueError unless every team has a multi-agent algorithm with valid fields; converts teams to texts."""
        teams = self.teams.split() if isinstance(self.teams, str) else self.teams
        if not isinstance(teams, list | tuple | Mapping):
            raise ValueError(f"Teams.teams={teams!r}: use a mapping, such as {{'adversary': 'mappo', 'agent': 'ippo'}}")
        pairs = teams.items() if isinstance(teams, Mapping) else map(split_team, teams)
        entries = [_entry(name, algorithm, self) for name, algorithm in pairs]
        if len({entry.name for entry in entries}) < len(entries):
            raise ValueError(f"Teams.teams={teams!r} names a team twice; give each team its own name")
        object.__setattr__(self, "teams", tuple(entry.text for entry in entries))

    @property
    def anneal_learning_rate(self) -> bool:
        """Whether the learning rate of a team falls over the run."""
        return any(getattr(entry.config, "anneal_learning_rate", False) for entry in self.entries())

    def entries(self) -> list["TeamSpec"]:
        """Parses and checks the teams."""
        return [_entry(*split_team(text), self) for text in self.teams]

    def build(self, env: MultiAgentEnvironment) -> Agent:
        """Builds the agent for one environment; raises ValueError or TypeError unless agents, teams and spaces fit."""
        entries, name = self.entries(), env_name(env)
        if not entries:
            raise ValueError(f"Teams.teams is empty; give each agent of {name} a team: {', '.join(env.agents)}")
        if all(entry.config is None for entry in entries):
            raise ValueError(f"no team of {self.teams} learns; give one an algorithm")
        members = members_of(tuple(env.agents), entries, name)
        venv = vectorize_agents(env, self.num_envs, members)

        def build_agent(numbers: Mapping[str, Any]) -> Agent:
            teams = {}
            for entry in entries:
                values = {name.partition("/")[2]: x for name, x in numbers.items() if name.partition("/")[0] == entry.name}
                team = entry.config and resolve.with_numbers_of(resolve.objects(entry.config), values)
                teams[entry.name] = _build_team(dataclasses.replace(entry, config=team), venv, members[entry.name], self)
            return teams_agent(venv, teams, unroll_length=self.unroll_length)

        schedules = {e.name: resolve.check(e.config) for e in entries if e.config is not None}
        return scheduled(
            build_agent, {f"{team}/{field}": x for team, fields in schedules.items() for field, x in fields.items()}
        )


@dataclasses.dataclass(frozen=True)
class TeamSpec:
    """A team of a config."""

    name: str
    patterns: tuple[str, ...]  # patterns of its agents' names; if empty, names that start with the team's name
    config: Any  # config of its algorithm; None for random actions

    def fits(self, agent: str) -> bool:
        """Whether an agent belongs to the team, by its name."""
        if not self.patterns:
            return agent.startswith(self.name)
        return any(fnmatch.fnmatchcase(agent, pattern) for pattern in self.patterns)

    @property
    def text(self) -> str:
        """Returns the team as `TEAM=ALGORITHM:field=value,...`."""
        fields = [write_agents(self.patterns)] if self.patterns else []
        fields_set = fields_of(self.config) if self.config else {}
        for name, value in fields_set.items():
            if is_object(value) and not isinstance(path := reference(value), str):
                raise ValueError(f"team {self.name!r} has {path['object']} as {name}; teams are text, so give MODULE:NAME")
        fields_set = {name: reference(value) if is_object(value) else value for name, value in fields_set.items()}
        fields += [f"{k}={write_value(value)}".replace(" ", "") for k, value in fields_set.items() if k not in _SHARED]
        name = type(self.config).name if self.config else RANDOM
        if self.config and files.is_file(file := files.reference(type(self.config))):
            name = file
        return f"{self.name}={name}" + ":" * bool(fields) + ",".join(fields)


def _entry(team: Any, algorithm: Any, run: Teams) -> TeamSpec:
    """Parses a team from a text or a config; raises ValueError if it is invalid."""
    if not isinstance(team, str) or not re.fullmatch(r"[^\s=/:,]+", team):  # the name is part of metric names
        raise ValueError(f"a team cannot have the name {team!r}; use letters, digits, _ and -")
    place, shared = f"team {team!r}", {name: getattr(run, name) for name in _SHARED}
    kind: Any = None
    if isinstance(algorithm, str):
        name, fields, patterns = read_algorithm(team, algorithm)
        if name in ALGORITHMS or ":" in name or files.is_file(name):
            kind = get(name)
    elif hasattr(algorithm, "build") and dataclasses.is_dataclass(algorithm) and not isinstance(algorithm, type):
        kind, fields, patterns = type(algorithm), fields_of(algorithm), ()
        name = kind.name
    else:
        raise ValueError(f"Teams.teams[{team!r}] is {algorithm!r}; give a config such as IPPO(), or a text such as 'ippo'")
    if shared_fields := [name for name in _SHARED if name in fields]:
        raise ValueError(f"{place} sets {shared_fields[0]}, which all teams share; set it for the run")
    if name == RANDOM:
        if fields:
            raise ValueError(f"{place} sets {', '.join(fields)}, but random actions need no settings; leave them out")
        return TeamSpec(team, patterns, None)
    if not hasattr(kind, "build_team"):
        names = sorted([name for name, config_class in ALGORITHMS.items() if hasattr(config_class, "build_team")] + [RANDOM])
        raise ValueError(f"{place} has the algorithm {name!r}{suggestion(name, names)}; teams can have {', '.join(names)}")
    try:
        return TeamSpec(team, patterns, make(kind, fields | shared))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from None


def members_of(agents: tuple[str, ...], entries: list[TeamSpec], env: str) -> dict[str, tuple[int, ...]]:
    """Returns the agent indices of each team; raises ValueError unless every agent has one team, and every team has agents."""
    members: dict[str, tuple[int, ...]] = {}
    agents_text = f"the agents of {env} are {', '.join(agents)}"
    for entry in entries:
        fits = [entry.fits(agent) for agent in agents]
        members[entry.name] = tuple(i for i, fit in enumerate(fits) if fit)
        if not any(fits) and not entry.patterns:
            raise ValueError(f"no agent's name begins with {entry.name!r}, the name of a team; {agents_text}")
        for pattern in entry.patterns:
            if not any(fnmatch.fnmatchcase(agent, pattern) for agent in agents):
                raise ValueError(f"no agent fits agents={pattern} of team {entry.name!r}; {agents_text}")
    for i, agent in enumerate(agents):
        teams = [name for name, numbers in members.items() if i in numbers]
        if not teams:
            example = agent.rstrip("0123456789").rstrip("_") or agent
            raise ValueError(
                f"agent {agent!r} of {env} has no learner; add a team for it, such as {example}={RANDOM}; {agents_text}"
            )
        if len(teams) > 1:
            raise ValueError(
                f"agent {agent!r} of {env} has {len(teams)} learners, teams {' and '.join(map(repr, teams))}; name the agents "
                f"of a team: {teams[0]}=ALGORITHM:agents=PATTERN"
            )
    return members


def _build_team(entry: TeamSpec, venv: VectorizedAgents, members: tuple[int, ...], run: Teams) -> Team:
    """Builds a team of the agents with the indices `members`; errors name the team."""
    if entry.config is None:
        return random_team(venv, len(members), run.unroll_length, seed=members[0])
    try:
        return entry.config.build_team(venv, len(members))
    except (ValueError, TypeError) as error:
        raise type(error)(f"team {entry.name!r}: {error}") from None


def random_team(venv: VectorizedAgents, num_agents: int, unroll_length: int, seed: int) -> Team:
    """Makes a team that takes uniformly random legal actions, also outside of training, where its carry counts steps for keys.

    The seed is used for actions without a key, so that random teams do not act identically.
    """
    space = check_policy_space(venv.action_space)

    @fragment(role="actor")
    def draw_keys(keys):
        return split_keys(keys, unroll_length)

    def sample(obs: Any, keys: jax.Array) -> jax.Array:
        """Draws random actions `[E, A, ...]`, with one key per environment `[E]`."""
        keys = jax.vmap(lambda key: jax.random.split(key, num_agents))(keys)
        return jax.vmap(lambda keys, obs: uniform_actions(keys, space, obs))(keys, obs)

    choose: Any = fragment(role="actor", name="choose")(sample)

    def begin(params: Any, keys: jax.Array, progress: Progress) -> tuple[Any, jax.Array, jax.Array]:
        keys, step_keys = draw_keys(keys)
        return params, keys, step_keys

    def learn(
        params: Any, team_state: Any, experience: Experience, now: Now, carry: Any, progress: Progress
    ) -> tuple[Any, Any, Metrics]:
        return params, team_state, {}

    def choose_action(params: Any, team_state: Any, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
        (steps,) = carry
        keys = jax.random.split(jax.random.key(seed) if key is None else key, len(steps))
        return sample(obs, jax.vmap(jax.random.fold_in)(keys, steps)), (steps + 1,)

    return Team(
        init=lambda params_key, actor_key, learner_key: ((), jax.random.split(actor_key, venv.num_envs)),
        axes=((), P("env")),
        begin=begin,
        act=lambda acting, now, carry, keys: (choose(now.obs, keys), (), carry),
        learn=learn,
        choose_action=choose_action,
        initial_carry=lambda num_envs: (jnp.zeros(num_envs, jnp.int32),),
        updates_per_iteration=0,
        agent_axes=P("env"),
    )
