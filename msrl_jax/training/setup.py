"""From names to a run: looks everything up, and checks it before anything compiles."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax

from msrl_jax import algorithms, data, envs, policies
from msrl_jax._checks import check_seed, whole
from msrl_jax._spec import parse_spec
from msrl_jax.algorithms import Agent, Algorithm
from msrl_jax.data.experience import RecordedEnvironment
from msrl_jax.data.spaces import agents_of, check_rows_fit
from msrl_jax.envs import Environment
from msrl_jax.envs.base import env_name
from msrl_jax.envs.host.base import is_on_host
from msrl_jax.envs.params import GivenParams, randomized
from msrl_jax.fragments.compiler import compile as compile_program
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Program
from msrl_jax.training.acting import Behavior
from msrl_jax.training.evolving import evolving, standing
from msrl_jax.training.hyperparameters import Settings, arrays, count, read_settings, tuned
from msrl_jax.training.members import initial_key, population
from msrl_jax.training.pbt import PBT, GivenPBT, read
from msrl_jax.training.skipping import skipping


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run that is checked and ready to compile.

    Attributes:
      algorithm: the algorithm.
      env: the environment, with the parameters that are drawn.
      env_spec: name and parameters of the environment as text; None if it was given as an object.
      config: the algorithm's config.
      seed: the first seed.
      seeds: the number of members of each setting.
      behavior: the behavior of one member, with its agent.
      recorded: the agent with recorded environments, if the run is recorded.
      recorded_steps: the steps that these environments keep.
      skips: whether the run drops updates that are not finite.
      dataset: the data set of the run, if it has one.
      env_params: what parameters of the environment are drawn from; None if all are constants.
      settings: the fields of the config in which members differ, with the values of every setting.
      pbt: how the population is trained; None if its members are independent. Every setting has then a seed of its own.
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
    env_params: GivenParams | None = None
    settings: Settings = dataclasses.field(default_factory=dict)
    pbt: PBT | None = None

    @property
    def members(self) -> int:
        """The number of members: every setting with every seed."""
        return self.seeds * count(self.settings)

    @property
    def has_members(self) -> bool:
        """Whether the state has a member axis."""
        return self.seeds > 1 or bool(self.settings)

    @property
    def key(self) -> jax.Array:
        """The initial key, or keys `[M]`."""
        if self.pbt is not None:
            return initial_key(self.seed, self.members)
        return initial_key(self.seed, self.seeds, count(self.settings) if self.settings else None)

    @property
    def exploit_steps(self) -> int | None:
        """Steps between two exploits of a population that is trained."""
        return None if self.pbt is None else self.pbt.every * self.behavior.agent.steps_per_iteration

    @property
    def env_name(self) -> str:
        """The name of the environment in messages and files."""
        return self.env_spec or getattr(self.env, "name", type(self.env).__name__)

    @property
    def agent(self) -> Agent:
        """The agent of the whole run: a population if there are several seeds or settings."""
        agent = self.recorded or self.behavior.agent
        agent = skipping(agent) if self.skips else agent
        agent = population(agent, arrays(self.settings, self.seeds)) if self.has_members else agent
        return agent if self.pbt is None else evolving(agent, self.pbt)

    def initial_state(self) -> Any:
        """The initial state of the run."""
        return self.agent.with_data(jax.jit(self.agent.init)(self.key))

    def start(self, program: Program) -> Any:
        """The initial state of the run, placed for a program."""
        agent = self.agent
        return program.initialize(lambda key: agent.with_data(agent.init(key)), self.key)

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
            **({"settings": self.settings} if self.settings else {}),
            **({"pbt": self.pbt.to_json()} if self.pbt else {}),
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
        agent = _build(self.algorithm, self.env, config, self.dataset, self.settings, self.pbt)
        return dataclasses.replace(self, config=config, behavior=Behavior(agent, self.env))

    def record(self, steps: int) -> "Setup":
        """The same run with environments that keep their last `steps` steps."""
        if (groups := getattr(self.config, "env_groups", 1)) > 1:
            raise ValueError(f"env_groups={groups}: a run whose steps are recorded takes env_groups=1")
        env: Any = RecordedEnvironment(self.env, steps)
        check_rows_fit(self.env, self.config.total_steps * self.members, "Record a shorter run, or fewer seeds")
        recorded = _build(self.algorithm, env, self.config, self.dataset, self.settings, self.pbt)
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


def _build(
    algorithm: Algorithm, env: Any, config: Any, dataset: data.Dataset | None, settings: Settings, pbt: PBT | None
) -> Agent:
    config = config if dataset is None else dataclasses.replace(config, data=dataset)
    if not settings:
        return algorithm.build(env, config)
    agent = tuned(functools.partial(algorithm.build, env), config, settings)
    return agent if pbt is None else standing(agent)


def resolve(
    algo: str,
    env: str | Environment,
    *,
    seed: int = 0,
    seeds: int = 1,
    config: Any = None,
    overrides: dict[str, Any] | None = None,
    env_params: GivenParams | None = None,
    settings: Settings | None = None,
    pbt: GivenPBT | None = None,
) -> Setup:
    """Looks everything up, and builds the agent.

    Args:
      algo: name of an algorithm.
      env: `NAME` or `NAME:param=value,...` of an environment, or an environment.
      seed: the first seed.
      seeds: the number of members of each setting.
      config: the algorithm's config; the defaults if None.
      overrides: fields of the config to replace; those that are `Tunable` may have a sequence of values.
      env_params: what parameters of the environment are drawn from, as in `RandomizeParams`; None leaves all constant.
      settings: further fields with several values, as `Setup.settings` has them.
      pbt: how the population is trained; None if its members are independent.

    Returns:
      The setup of the run.

    Raises:
      ValueError: on an unknown name or field, or an invalid value.
    """
    seeds = whole("seeds", seeds)
    pbt = None if pbt is None else read(pbt)
    if pbt is not None and seeds > 1:
        raise ValueError(f"seeds={seeds}: the members of a population have the seeds from seed on; give pbt members={seeds}")
    seed = check_seed(seed, seeds if pbt is None else pbt.members)
    algorithm = algorithms.get(algo)
    overrides = {**(overrides or {}), **(settings or {})}
    if pbt is not None:
        pbt.check(algorithm, config, overrides)
        overrides = pbt.initial(seed) | overrides
    overrides, settings = read_settings(algorithm, config, overrides, seeds)
    config = algorithm.make_config(config, overrides)
    env_spec = env if isinstance(env, str) else None
    if isinstance(env, str):
        env = envs.make(env)
    algorithm.check_env(env)
    if (seeds > 1 or settings) and is_on_host(env):
        given = f"seeds={seeds}" if seeds > 1 else ", ".join(f"{name}={list(x)}" for name, x in settings.items())
        given = given if pbt is None else f"pbt with members={pbt.members}"
        raise ValueError(
            f"{given}: members share a program, but {env_name(env)} is simulated on the host; run one after another"
        )
    env = randomized(env, env_params)
    dataset = data.load(config.data) if getattr(config, "data", None) is not None else None
    behavior = Behavior(_build(algorithm, env, config, dataset, settings, pbt), env)
    return Setup(
        algorithm, env, env_spec, config, seed, seeds, behavior, dataset=dataset, env_params=env_params or None,
        settings=settings, pbt=pbt,
    )  # fmt: skip
