"""Several teams in one environment, each with its own algorithm, all trained at once."""

import dataclasses
import fnmatch
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax._spec import parse_spec
from msrl_jax._spelling import suggestion
from msrl_jax.algorithms.agent import ALGORITHMS, Agent, Metrics, get
from msrl_jax.algorithms.config import config, field
from msrl_jax.algorithms.loops.agents import Experience, Now, Team, teams_agent
from msrl_jax.algorithms.loops.exploration import uniform_actions
from msrl_jax.algorithms.loops.trajectory import split_keys
from msrl_jax.algorithms.networks.actions import check_policy_space
from msrl_jax.envs import MultiAgentEnvironment, VectorizedAgents, vectorize_agents
from msrl_jax.fragments import fragment

RANDOM = "random"
"""The algorithm of a team that takes uniformly random legal actions, and learns nothing."""


@config("teams", many_agents=True)
class Teams:
    """What several teams compute; a distribution policy decides where it runs."""

    num_envs: int = field(default=64, doc="environments stepped in parallel, `E`. Usual: 8 to 4096.")
    unroll_length: int = field(default=32, doc="steps of every environment per iteration, `T`. Usual: 16 to 128.")
    teams: tuple[str, ...] = field(
        default=(),
        doc='`TEAM=ALGORITHM:field=value,...` for each team, or a mapping from the name of the team to the rest. The algorithm '
        'is one for several agents, or "random". The agents of a team are those whose names begin with the name of the '
        'team, or fit the field `agents`, patterns such as `agents=ally_*|medic`. `msrl-jax train --algo mappo --help` '
        'lists the other fields. Usual: adversary=mappo agent=ippo.',
    )

    def check(self) -> None:
        """Raises ValueError unless every team is text with an algorithm for teams and fields that it has."""
        object.__setattr__(self, "teams", self.canonical("teams", self.teams))
        entries = self.entries()
        if len({entry.name for entry in entries}) < len(entries):
            raise ValueError(f"Teams.teams={self.teams!r} names a team twice; give each team its own name")

    @staticmethod
    def canonical(field: str, value: Any) -> Any:
        """Teams as texts `TEAM=ALGORITHM:...`; raises ValueError if they are neither these nor a mapping."""
        if field != "teams":
            return value
        if isinstance(value, str):
            return tuple(value.split())
        if isinstance(value, Mapping):
            for name, spec in value.items():
                _check_name(name)
                if not isinstance(spec, str):
                    raise ValueError(f"Teams.teams[{name!r}] is {spec!r}; write text such as 'ippo:learning_rate=1e-3'")
            return tuple(f"{name}={spec}" for name, spec in value.items())
        if not isinstance(value, list | tuple):
            raise ValueError(f"Teams.teams={value!r}: use a mapping, such as {{'adversary': 'mappo', 'agent': 'ippo'}}")
        return tuple(value)

    @property
    def anneal_learning_rate(self) -> bool:
        """Whether the learning rate of a team falls over `total_steps`."""
        return any(getattr(entry.config, "anneal_learning_rate", False) for entry in self.entries())

    def entries(self) -> list["Entry"]:
        """The teams, read and checked."""
        return [_entry(text, self) for text in self.teams]

    def build(self, env: MultiAgentEnvironment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        return build(env, self)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A team of a config.

    Attributes:
      name: its name.
      patterns: patterns of the names of its agents; None for those that begin with its own name.
      algorithm: its algorithm; None for random actions.
      config: the config of the algorithm; None for random actions.
    """

    name: str
    patterns: tuple[str, ...] | None
    algorithm: Algorithm | None
    config: Any

    def fits(self, agent: str) -> bool:
        """Whether an agent belongs to the team, by its name."""
        if self.patterns is None:
            return agent.startswith(self.name)
        return any(fnmatch.fnmatchcase(agent, pattern) for pattern in self.patterns)


def _entry(text: str, run: Teams) -> Entry:
    """Reads a team; raises ValueError if it cannot be one."""
    if not isinstance(text, str) or "=" not in text.partition(":")[0]:
        raise ValueError(f"Teams.teams has {text!r}; write TEAM=ALGORITHM or TEAM=ALGORITHM:field=value,...")
    team, _, spec = text.partition("=")
    _check_name(team := team.strip())
    spec, patterns = _without_agents(team, spec.strip())
    name, fields = parse_spec(spec)
    where = f"team {team!r}"
    for field in ("num_envs", "unroll_length", "total_steps"):
        if field in fields:
            raise ValueError(f"{where} sets {field}, which all teams share; set it for the run")
    if name == RANDOM:
        if fields:
            raise ValueError(f"{where} sets {', '.join(fields)}, but random actions need no settings; leave them out")
        return Entry(team, patterns, None, None)
    able = sorted([n for n, a in ALGORITHMS.items() if a.make_team is not None] + [RANDOM])
    if name not in able:
        raise ValueError(f"{where} has the algorithm {name!r}{suggestion(name, able)}; teams can have {', '.join(able)}")
    algorithm = get(name)
    try:
        shared = {field: getattr(run, field) for field in ("num_envs", "unroll_length", "total_steps")}
        return Entry(team, patterns, algorithm, algorithm.make_config(None, fields | shared))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _check_name(name: Any) -> None:
    """Raises ValueError unless a text can be the name of a team, which is also in names of metrics."""
    if not isinstance(name, str) or not re.fullmatch(r"[^\s=/:,]+", name):
        raise ValueError(f"a team cannot have the name {name!r}; use letters, digits, _ and -")


def _without_agents(team: str, spec: str) -> tuple[str, tuple[str, ...] | None]:
    """Takes `agents=...` out of `ALGORITHM:field=value,...`; returns the rest, and the patterns."""
    name, _, fields = spec.partition(":")
    found = re.findall(r"(?:^|,)\s*agents\s*=([^,]*)", fields)
    if not found:
        return spec, None
    patterns = tuple(part.strip() for part in found[0].strip().strip("'\"").split("|"))
    if len(found) > 1 or "" in patterns or patterns[0][:1] in "([":
        raise ValueError(f"team {team!r}: cannot read agents in {spec!r}; write names or patterns once: agents=ally_*|medic")
    rest = re.sub(r"(?:^|,)\s*agents\s*=[^,]*", "", fields).strip().removeprefix(",")
    return f"{name}:{rest}" if rest else name, patterns


def members_of(agents: tuple[str, ...], entries: list[Entry], env: str) -> dict[str, tuple[int, ...]]:
    """Maps agents to teams.

    Args:
      agents: the names of the agents.
      entries: the teams.
      env: name of the environment, for messages.

    Returns:
      The numbers of the agents of each team.

    Raises:
      ValueError: if an agent has no team or several, or if a team has no agents.
    """
    members: dict[str, tuple[int, ...]] = {}
    known = f"the agents of {env} are {', '.join(agents)}"
    for entry in entries:
        fits = [entry.fits(agent) for agent in agents]
        members[entry.name] = tuple(i for i, fit in enumerate(fits) if fit)
        if not any(fits) and entry.patterns is None:
            raise ValueError(f"no agent's name begins with {entry.name!r}, the name of a team; {known}")
        for pattern in entry.patterns or ():
            if not any(fnmatch.fnmatchcase(agent, pattern) for agent in agents):
                raise ValueError(f"no agent fits agents={pattern} of team {entry.name!r}; {known}")
    for i, agent in enumerate(agents):
        teams = [name for name, numbers in members.items() if i in numbers]
        if not teams:
            example = agent.rstrip("0123456789").rstrip("_") or agent
            raise ValueError(f"agent {agent!r} of {env} has no learner; add a team for it, such as {example}={RANDOM}; {known}")
        if len(teams) > 1:
            raise ValueError(
                f"agent {agent!r} of {env} has {len(teams)} learners, teams {' and '.join(map(repr, teams))}; name the agents "
                f"of a team: {teams[0]}=ALGORITHM:agents=PATTERN"
            )
    return members


def build(env: MultiAgentEnvironment, config: Teams) -> Agent:
    """Builds the agent of several teams.

    Args:
      env: the environment of several agents.
      config: the teams.

    Returns:
      The agent; metrics have the names `METRIC/TEAM`.

    Raises:
      ValueError: if an agent has no team or several, or if an algorithm does not fit.
      TypeError: if a space is not supported, or a result of the environment does not fit the protocol.
    """
    entries, name = config.entries(), getattr(env, "name", type(env).__name__)
    if not entries:
        raise ValueError(f"Teams.teams is empty; give each agent of {name} a team: {', '.join(env.agents)}")
    if all(entry.algorithm is None for entry in entries):
        raise ValueError(f"no team of {config.teams} learns; give one an algorithm")
    members = members_of(tuple(env.agents), entries, name)
    venv = vectorize_agents(env, config.num_envs, members)
    teams = {entry.name: _make_team(entry, venv, len(members[entry.name]), config) for entry in entries}
    return teams_agent(venv, teams, unroll_length=config.unroll_length)


def _make_team(entry: Entry, venv: VectorizedAgents, num_agents: int, run: Teams) -> Team:
    """Makes a team; errors name it."""
    if entry.algorithm is None:
        return random_team(venv, num_agents, run.unroll_length)
    assert entry.algorithm.make_team is not None
    try:
        return entry.algorithm.make_team(venv, num_agents, entry.config)
    except (ValueError, TypeError) as error:
        raise type(error)(f"team {entry.name!r}: {error}") from None


def random_team(venv: VectorizedAgents, num_agents: int, unroll_length: int) -> Team:
    """A team that takes uniformly random legal actions, also outside of training, and learns nothing.

    Args:
      venv: the vector environment.
      num_agents: number of agents of the team, `A`.
      unroll_length: steps of every environment per iteration.

    Returns:
      The team. Outside of training, it counts its steps in a carry, so that it also acts at random without a key.
    """

    space = check_policy_space(venv.action_space)

    @fragment(role="actor")
    def draw_keys(keys):
        return split_keys(keys, unroll_length)

    def sample(obs: Any, keys: jax.Array) -> jax.Array:
        """Random actions `[E, A, ...]`, one key for every environment `[E]`."""
        keys = jax.vmap(lambda key: jax.random.split(key, num_agents))(keys)
        return jax.vmap(lambda keys, obs: uniform_actions(keys, space, obs))(keys, obs)

    choose: Any = fragment(role="actor", name="choose")(sample)

    def begin(params: Any, keys: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        keys, step_keys = draw_keys(keys)
        return params, keys, step_keys

    def learn(params: Any, rest: Any, experience: Experience, now: Now, carry: Any) -> tuple[Any, Any, Metrics]:
        return params, rest, {}

    def choose_action(params: Any, rest: Any, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
        (steps,) = carry
        keys = jax.random.split(jax.random.key(0) if key is None else key, len(steps))
        return sample(obs, jax.vmap(jax.random.fold_in)(keys, steps)), (steps + 1,)

    return Team(
        init=lambda params_key, actor_key, learner_key: ((), jax.random.split(actor_key, venv.num_envs)),
        axes=((), P("env")),
        begin=begin,
        act=lambda acting, now, carry, keys: (choose(now.obs, keys), (), carry),
        learn=learn,
        choose_action=choose_action,
        initial_carry=lambda num_envs: (jnp.zeros(num_envs, jnp.int32),),
        recurrent=True,
        updates_per_iteration=0,
        agent_axes=P("env"),
    )

