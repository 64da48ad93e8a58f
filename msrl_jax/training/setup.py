"""From names to a run: looks everything up, and checks it before anything compiles."""

import ast
import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from msrl_jax import algorithms, data, envs, policies
from msrl_jax._checks import check_seed, whole
from msrl_jax._spelling import suggestion
from msrl_jax.algorithms import Agent, Algorithm
from msrl_jax.data.experience import RecordedEnvironment
from msrl_jax.data.spaces import agents_of, check_rows_fit
from msrl_jax.envs import Environment
from msrl_jax.envs.registry import SUITES
from msrl_jax.fragments.compiler import compile as compile_program
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Program
from msrl_jax.training.acting import Behavior
from msrl_jax.training.members import initial_key, population
from msrl_jax.training.skipping import skipping


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Splits `"NAME:key=value,key=value"` into the name and the arguments.

    Args:
      spec: a name, and optionally a colon and keyword arguments. A name may begin with the name of a suite and a colon:
        `jaxmarl:MPE_simple_spread_v3:num_agents=5`. Values are Python literals, or bare words, which may be calls:
        `trajectory_codec=frame_stack(4)`. Words may begin with a digit: `scenario=3s_vs_5z`.

    Returns:
      The name and the arguments.

    Raises:
      ValueError: if the text after the colon cannot be read.
    """
    suite = next((prefix for prefix in SUITES if spec.startswith(prefix)), "")
    name, colon, text = spec.removeprefix(suite).partition(":")
    name = suite + name
    if not colon:
        return name, {}
    try:
        call = ast.parse(f"_({_WORD.sub(_quoted, text)})", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return name, {str(k.arg): _literal(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(f"cannot read {text!r} in {spec!r}; write {name}:key=value,key=value") from None


_WORD = re.compile(r"((?:^|,)\s*\w+\s*=\s*)(\d\w*[a-zA-Z]\w*)(?=\s*(?:,|$))")
"""A key, and its value that begins with a digit and has a letter."""


def _quoted(found: re.Match[str]) -> str:
    """The key and its value, in quotes unless it is a number such as 1e5."""
    key, word = found.groups()
    try:
        ast.literal_eval(word)
    except (SyntaxError, ValueError):
        word = repr(word)
    return key + word


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    words = isinstance(node, ast.Name | ast.Attribute | ast.Call)
    return ast.unparse(node) if words else ast.literal_eval(node)


def make_config(algorithm: Algorithm, config: Any, overrides: dict[str, Any]) -> Any:
    """Makes the config of a run.

    Args:
      algorithm: the algorithm.
      config: the config to start from; the defaults if None.
      overrides: fields to replace.

    Returns:
      An instance of `algorithm.config`.

    Raises:
      ValueError: on a config of another type, on an unknown field (the message suggests the nearest one), and on a field that
        has no effect with the other fields.
    """
    config = algorithm.config() if config is None else config
    if not isinstance(config, algorithm.config):
        raise ValueError(
            f"config is a {type(config).__name__}, but algorithm {algorithm.name!r} takes a {algorithm.config.__name__}"
        )
    fields = [f.name for f in dataclasses.fields(config)]
    for name in overrides:
        if name not in fields:
            raise ValueError(
                f"{type(config).__name__} has no field {name!r}{suggestion(name, fields)}; its fields are {', '.join(fields)}"
            )
    config = dataclasses.replace(config, **overrides)
    config.check_given(overrides)
    return config


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run that is checked and ready to compile.

    Attributes:
      algorithm: the algorithm.
      env: the environment.
      env_spec: name and parameters of the environment as text; None if it was given as an object.
      config: the algorithm's config.
      seed: the first seed.
      seeds: the number of members.
      behavior: the behavior of one member, with its agent.
      recorded: the agent with recorded environments, if the run is recorded.
      recorded_steps: the steps that these environments keep.
      skips: whether the run drops updates that are not finite.
      dataset: the data set of the run, if it has one.
    """

    algorithm: Algorithm
    env: Environment
    env_spec: str | None
    config: Any
    seed: int
    seeds: int
    behavior: Behavior
    recorded: Agent | None = None
    recorded_steps: int | None = None
    skips: bool = False
    dataset: data.Dataset | None = None

    @property
    def env_name(self) -> str:
        """The name of the environment in messages and files."""
        return self.env_spec or getattr(self.env, "name", type(self.env).__name__)

    @property
    def agent(self) -> Agent:
        """The agent of the whole run: a population if there are several seeds."""
        agent = self.recorded or self.behavior.agent
        agent = skipping(agent) if self.skips else agent
        return agent if self.seeds == 1 else population(agent)

    def initial_state(self) -> Any:
        """The initial state of the run."""
        return self.agent.with_data(jax.jit(self.agent.init)(initial_key(self.seed, self.seeds)))

    def start(self, program: Program) -> Any:
        """The initial state of the run, placed for a program."""
        agent = self.agent
        return program.initialize(lambda key: agent.with_data(agent.init(key)), initial_key(self.seed, self.seeds))

    def about(self) -> dict[str, Any]:
        """A description of the run for its data sets."""
        return {
            "env": self.env_name,
            "observation_space": str(self.env.observation_space),
            "action_space": str(self.env.action_space),
            **agents_of(self.env),
            "made_by": f"training {self.algorithm.name}",
            "seed": self.seed,
            "seeds": self.seeds,
        }

    @property
    def data_source(self) -> dict[str, Any] | None:
        """Absolute path and SHA-256 of the data set, if there is one; no path if it was given as an object."""
        if self.dataset is None:
            return None
        path = self.config.data
        if isinstance(path, data.Dataset):
            return {"path": None, "sha256": self.dataset.fingerprint()}
        known = os.path.exists(path)  # else the id of a data set in the library of its format
        return {"path": os.path.abspath(path) if known else os.fspath(path), "sha256": self.dataset.fingerprint()}

    def with_config(self, config: Any) -> "Setup":
        """The same run with another config."""
        agent = _build(self.algorithm, self.env, config, self.dataset)
        return dataclasses.replace(self, config=config, behavior=Behavior(agent, self.env))

    def record(self, steps: int) -> "Setup":
        """The same run with environments that keep their last `steps` steps."""
        env: Any = RecordedEnvironment(self.env, steps)
        check_rows_fit(self.env, self.config.total_steps * self.seeds, "Record a shorter run, or fewer seeds")
        recorded = _build(self.algorithm, env, self.config, self.dataset)
        return dataclasses.replace(self, recorded=recorded, recorded_steps=steps)

    def compile(self, policy: DistributionPolicy, devices: Sequence[Device] | None = None) -> Program:
        """Plans the run for a distribution policy, from shapes alone; XLA compiles at the first use."""
        state = jax.eval_shape(self.initial_state)
        program = compile_program(
            self.agent.iteration,
            state,
            policy=policy,
            axes=self.agent.axes,
            groups={"env": self.agent.env_group},
            devices=devices,
        )
        program.check_memory()
        return program


def resolve_policy(policy: str | DistributionPolicy) -> DistributionPolicy:
    """Looks up a distribution policy.

    Args:
      policy: `NAME` or `NAME:param=value,...`, or a policy.

    Returns:
      The policy.

    Raises:
      ValueError: on an unknown name or parameter.
    """
    if not isinstance(policy, str):
        return policies.get(policy)
    name, params = parse_spec(policy)
    return policies.get(name, **params)


def _build(algorithm: Algorithm, env: Any, config: Any, dataset: data.Dataset | None) -> Agent:
    return algorithm.build(env, config if dataset is None else dataclasses.replace(config, data=dataset))


def resolve(
    algo: str,
    env: str | Environment,
    *,
    seed: int = 0,
    seeds: int = 1,
    config: Any = None,
    overrides: dict[str, Any] | None = None,
) -> Setup:
    """Looks everything up, and builds the agent.

    Args:
      algo: name of an algorithm.
      env: `NAME` or `NAME:param=value,...` of an environment, or an environment.
      seed: the first seed.
      seeds: the number of members.
      config: the algorithm's config; the defaults if None.
      overrides: fields of the config to replace.

    Returns:
      The setup of the run.

    Raises:
      ValueError: on an unknown name or field, or an invalid value.
    """
    seeds = whole("seeds", seeds)
    seed = check_seed(seed, seeds)
    algorithm = algorithms.get(algo)
    config = make_config(algorithm, config, overrides or {})
    env_spec = env if isinstance(env, str) else None
    if isinstance(env, str):
        name, params = parse_spec(env)
        env = envs.make(name, **params)
    algorithm.check_env(env)
    dataset = data.load(config.data) if getattr(config, "data", None) is not None else None
    behavior = Behavior(_build(algorithm, env, config, dataset), env)
    return Setup(algorithm, env, env_spec, config, seed, seeds, behavior, dataset=dataset)
