"""`Experiment`: one value with everything that determines what a run computes, but not where it runs or what observes it."""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np

from msrl_jax import algorithms, data, envs
from msrl_jax.agents.agent import Agent, innermost
from msrl_jax.agents.replay_ratio import check_learns
from msrl_jax.agents.transformations import counted
from msrl_jax.configs.classes import short_repr
from msrl_jax.configs.deferred import is_deferred, is_object
from msrl_jax.configs.names import tunable_fields
from msrl_jax.data.check_spaces import agents_of, check_rows_fit
from msrl_jax.data.experience import RecordedEnvironment
from msrl_jax.envs import Environment
from msrl_jax.envs.base import PyTree, check_made, env_name, is_on_host
from msrl_jax.envs.episode_metrics import metrics_of
from msrl_jax.envs.param_distributions import ramps
from msrl_jax.envs.param_sources import find_source, source_of
from msrl_jax.envs.params import GivenParams, RandomizeParams, params_text, randomized
from msrl_jax.envs.privileged import with_privileged
from msrl_jax.fragments.compiler import compile as compile_program
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Program
from msrl_jax.fragments.support.checks import check_seed, shown, suggestion, whole
from msrl_jax.fragments.support.naming import TrustError, check_trust
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.registry import code_names, files, resolve
from msrl_jax.registry.lookup import check_env
from msrl_jax.run.evaluation.evaluate import Behavior
from msrl_jax.run.evaluation.history import in_words
from msrl_jax.run.experiment.check_metrics import check_metrics
from msrl_jax.run.experiment.members import block_size, members, with_numbers
from msrl_jax.run.experiment.pbt import PBT, evolve, read_pbt
from msrl_jax.run.experiment.plain_data import MOST_SEEDS, RunFolderError, difference, each_member, plain_fields
from msrl_jax.run.experiment.skip_nonfinite import skip_nonfinite
from msrl_jax.run.experiment.trust import algorithm_of, code_of_run

GuardPolicy: TypeAlias = Literal["halt", "skip", "rollback", "ignore"]  # how a run handles non-finite values
Settings: TypeAlias = Mapping[str, tuple[float, ...]]  # the values of every setting, by field; empty if all are constants


@entry
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Experiment:
    """Everything that determines what a run computes.

    Attributes:
      algorithm: the config of the algorithm; that of the first member if members differ.
      env: `NAME` or `NAME:param=value,...` of an environment, or an environment.
      env_params: distributions of the environment's parameters, as in `envs.RandomizeParams`; None if all are constants.
      total_steps: steps of each member.
      seed: the first seed.
      seeds: the number of members per setting.
      settings: the fields of the config in which members differ, with the values of every setting.
      pbt: how to train the population; None if the members are independent. With PBT, every setting has a different seed.
      rank_by: the score that ranks members and checkpoints: "return", or the name of a metric of the environment.
      guard: how to handle nan and infinities; "skip" changes what is computed.
      recorded_steps: number of steps that the environments keep, if the run is recorded; ignored in comparisons.
    """

    algorithm: Any
    env: str | Environment = "CartPole-v1"
    env_params: GivenParams | None = None
    total_steps: int = 500_000
    seed: int = 0
    seeds: int = 1
    settings: Settings = dataclasses.field(default_factory=dict, hash=False)
    pbt: PBT | None = None
    rank_by: str = "return"
    guard: GuardPolicy = "halt"
    recorded_steps: int | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self):
        if isinstance(self.algorithm, str | type) or not dataclasses.is_dataclass(self.algorithm):
            raise TypeError(f"Experiment.algorithm={shown(self.algorithm)}: give a config, such as PPO(learning_rate=3e-4)")
        if not isinstance(self.env, str):
            check_made(self.env)
        if self.pbt is not None and not isinstance(self.pbt, PBT):
            raise TypeError(f"Experiment.pbt={shown(self.pbt)}: give a PBT")
        if self.guard not in get_args(GuardPolicy):
            options = get_args(GuardPolicy)
            raise ValueError(f"guard={self.guard!r}{suggestion(self.guard, options)}; use one of {', '.join(options)}")
        rate, optimizer = getattr(self.algorithm, "learning_rate", 0.0), getattr(self.algorithm, "optimizer", "adam")
        if self.guard == "rollback" and (is_deferred(rate) or resolve.is_custom_optimizer(optimizer)):
            raise ValueError(
                'guard="rollback" halves a learning rate that is a number, but this run has a schedule or an optimizer of its '
                'own; give a number, or use guard="halt" or "skip"'
            )
        if unknown_fields := [name for name in self.settings if name not in tunable_fields(self.algorithm)]:
            kind, options = type(self.algorithm).__name__, ", ".join(tunable_fields(self.algorithm))
            raise ValueError(f"Experiment.settings has {unknown_fields[0]!r}; members of {kind} can differ in {options}")
        object.__setattr__(self, "env_params", self.env_params or None)
        object.__setattr__(self, "seeds", whole("seeds", self.seeds, most=MOST_SEEDS))
        object.__setattr__(self, "total_steps", whole("total_steps", self.total_steps))
        self._check_members()
        object.__setattr__(self, "seed", check_seed(self.seed, self.members))

    def _check_members(self) -> None:
        """Raises ValueError unless all fields of `settings` have the same number of values, and every config is valid."""
        lengths = {name: len(values) for name, values in self.settings.items()}
        if 0 in lengths.values() or len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise ValueError(
                f"{counts} values; give each of these fields the same number of values, at least one. The first values are one "
                "setting, the second ones the next; msrl.sweep(..., method='grid') tries all combinations"
            )
        for i, values in enumerate(zip(*self.settings.values(), strict=True) if self.settings else [()]):
            setting = dict(zip(self.settings, values, strict=True))
            try:
                algorithms.make(self.algorithm, setting)
            except ValueError as error:
                if not setting:
                    raise
                raise ValueError(f"member {i * self.seeds} ({in_words(setting)}): {error}") from None

    __repr__ = short_repr

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields to pickle, without the agent and other values derived from them."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def name(self) -> str:
        """The name of the algorithm."""
        return self.algorithm.name

    @property
    def env_name(self) -> str:
        """The name of the environment in messages and files."""
        return self.env if isinstance(self.env, str) else env_name(self.env)

    @property
    def members(self) -> int:
        """The number of members: one for every pair of a setting and a seed."""
        return self.seeds * (len(next(iter(self.settings.values()))) if self.settings else 1)

    @property
    def has_members(self) -> bool:
        """Whether the state has a member axis."""
        return self.seeds > 1 or bool(self.settings)

    @property
    def each_member(self) -> list[dict[str, Any]]:
        """The seed of every member and its values of the fields in which members differ; the initial values if they evolve."""
        return each_member(self.seed, self.seeds, self.settings, evolve=self.pbt is not None)

    @property
    def key(self) -> jax.Array:
        """The initial key, or keys `[M]`: a member with the seed `s` has the key `jax.random.key(s)`."""
        if not self.has_members:
            return jax.random.key(jax.device_put(np.uint32(self.seed)))
        return jax.vmap(jax.random.key)(jax.device_put(np.array([member["seed"] for member in self.each_member], np.uint32)))

    @property
    def numbers(self) -> dict[str, np.ndarray]:
        """The values of every member: each setting has one member per seed, and these are adjacent. `[M]` float32"""
        return {name: np.repeat(np.asarray(values, np.float32), self.seeds) for name, values in self.settings.items()}

    @functools.cached_property
    def environment(self) -> Environment:
        """The environment, including the distributions of its parameters."""
        env = envs.make(self.env) if isinstance(self.env, str) else self.env
        check_env(self.algorithm, env)
        if self.rank_by not in (scores := ["return", *metrics_of(env)]):
            hint = suggestion(self.rank_by, scores) if isinstance(self.rank_by, str) else ""
            raise ValueError(f"rank_by={self.rank_by!r}{hint}: use what {env_name(env)} reports: {', '.join(scores)}")
        if self.has_members and is_on_host(env):
            fields = ", ".join(f"{name}={list(values)}" for name, values in self.settings.items())
            cause = f"seeds={self.seeds}" if self.seeds > 1 else f"pbt with members={self.members}" if self.pbt else fields
            raise ValueError(
                f"{cause}: members share a program, but {env_name(env)} is simulated on the host; run one after another"
            )
        return randomized(env, self.env_params)

    @property
    def usual_policy(self) -> str:
        """The default distribution policy of the run."""
        return "MultiLearner" if is_on_host(self.environment) else "GPUOnly"

    @property
    def is_ranked(self) -> bool:
        """Whether there is a score that ranks the members."""
        return self.rank_by != "return" or self.behavior.agent.ranked

    @functools.cached_property
    def dataset(self) -> data.Dataset | None:
        """The data set of the run, if it has one."""
        source = getattr(self.algorithm, "data", None)
        return None if source is None else data.load(source)

    def _member_agent(self, env: Environment, *, skips: bool) -> Agent:
        def build(config: Any) -> Agent:
            agent = check_metrics(resolve.build(config, env), self.name)
            return skip_nonfinite(agent) if skips else agent

        config = self.algorithm if self.dataset is None else dataclasses.replace(self.algorithm, data=self.dataset)
        return with_numbers(build, config, tuple(self.settings)) if self.settings else build(config)

    @functools.cached_property
    def behavior(self) -> Behavior:
        """The behavior of one member, with its agent."""
        return Behavior(self._member_agent(self.environment, skips=False), self.environment)

    @functools.cached_property
    def agent(self) -> Agent:
        """The agent of the whole run; its state is a `Counted`."""
        return self._agent_in_blocks(None)

    def _agent_in_blocks(self, block: int | None) -> Agent:
        steps, member_agent = self.recorded_steps, self.behavior.agent
        if steps is not None or self.guard == "skip":
            env: Any = self.environment if steps is None else RecordedEnvironment(self.environment, steps)
            member_agent = self._member_agent(env, skips=self.guard == "skip")
        agent = members(member_agent, self.numbers, block) if self.has_members else member_agent
        agent = agent if self.pbt is None else evolve(agent, self.pbt, self.rank_by)
        return counted(agent, self.iterations or None)

    @property
    def steps_per_iteration(self) -> int:
        """Steps per member in an iteration."""
        return self.behavior.agent.steps_per_iteration

    @property
    def iterations(self) -> int:
        """The number of whole iterations."""
        return self.total_steps // self.steps_per_iteration

    @property
    def parameters(self) -> dict[str, int]:
        """The number of trained parameters of one member, by part of the networks: the names at which the parameters branch."""
        params: PyTree = jax.eval_shape(self.behavior.agent.init, jax.random.key(0))
        params = innermost(params).params
        while isinstance(params, Mapping) and len(params) == 1:
            (params,) = params.values()
        parts = params if isinstance(params, Mapping) else {"params": params}
        return {name: sum(x.size for x in jax.tree.leaves(part)) for name, part in parts.items()}

    def check_length(self, chunk: int | None = None) -> None:
        """Raises ValueError if the run has no whole iteration, learns nothing, or has a population that never evolves, or
        evolves within a chunk."""
        per_iteration, iterations = self.steps_per_iteration, self.iterations
        if chunk is not None and self.pbt is not None and self.pbt.every % chunk:
            raise ValueError(
                f"chunk={chunk} does not divide PBT.every={self.pbt.every}, so a row of the history would mix hyperparameters "
                "from before and after an exploit; use a chunk that does, or leave it out"
            )
        if not iterations:
            raise ValueError(
                f"total_steps={self.total_steps} is less than the {per_iteration} steps of one iteration; use at least "
                f"{per_iteration}, or fewer environments or shorter unrolls"
            )
        check_learns(self.behavior.agent, iterations * per_iteration)
        if self.pbt is not None and iterations < self.pbt.every:
            raise ValueError(
                f"PBT.every={self.pbt.every}: the run has only {iterations} iterations, so the population would never evolve; "
                f"use a smaller every, or a larger total_steps (an iteration has {per_iteration})"
            )

    def initial_state(self) -> PyTree:
        """Makes the initial state of the run."""
        return self.agent.with_data(jax.jit(self.agent.init)(self.key))

    def start(self, program: Program) -> PyTree:
        """Makes the initial state of the run, placed for a program."""
        agent = self.agent
        return program.initialize(lambda key: agent.with_data(agent.init(key)), self.key)

    def compile(self, policy: DistributionPolicy, devices: Sequence[Device] | None = None) -> Program:
        """Plans the run for a distribution policy, from shapes alone; XLA compiles on first use."""
        agent, state = self.agent, jax.eval_shape(self.initial_state)
        sampler = source_of(self.environment)
        if sampler and ramps(sampler.values) and agent.unit == "environment steps" and not find_source(state):
            raise ValueError(
                f"env_params has a ramp, and {self.name} keeps no environments between iterations, so the ramp would stay at "
                "its start; use numbers and distributions"
            )
        compile_agent = lambda agent: compile_program(
            agent.iteration, state, policy=policy, axes=agent.axes, groups={"env": agent.env_group}, devices=devices
        )
        program = compile_agent(agent)  # the layout decides about blocks
        if block := block_size(agent, self.members, program.layout):
            program = compile_agent(self._agent_in_blocks(block))
        program.state.check_memory()
        return program

    def record(self, steps: int) -> "Experiment":
        """Returns the same run with environments that keep their last `steps` steps."""
        env = with_privileged(self.environment)
        check_rows_fit(env, self.total_steps * self.members, "Record a shorter run, or fewer seeds")
        return self.replaced(recorded_steps=steps)

    def replaced(self, **changes: Any) -> "Experiment":
        """Returns the run with changed fields, on the same environment and data, which are not rebuilt."""
        experiment = dataclasses.replace(self, **changes)
        vars(experiment).update({name: vars(self)[name] for name in ("environment", "dataset", "_data") if name in vars(self)})
        return experiment

    def to_json(self) -> dict[str, Any]:
        """Returns the experiment as plain data: the part of `config.json` that determines what is computed."""
        return self._plain_data() | {"data": self._data}

    def _plain_data(self) -> dict[str, Any]:
        kind, env = type(self.algorithm), repr(self.env.env if isinstance(self.env, RandomizeParams) else self.env)
        return {
            "algorithm": self.name,
            "class": files.reference(kind),
            "env": self.env_name,
            "env_spec": self.env if isinstance(self.env, str) else None,
            "env_object": None if isinstance(self.env, str) or " at 0x" in env else env,  # the repr of dataclasses, for example
            "env_params": params_text(self.env_params),
            "total_steps": self.total_steps,
            "seed": self.seed,
            "seeds": self.seeds,
            "settings": {name: list(values) for name, values in self.settings.items()} or None,
            "pbt": None if self.pbt is None else self.pbt.to_json(),
            "rank_by": self.rank_by,
            "guard": self.guard,
            "config": plain_fields({f.name: getattr(self.algorithm, f.name) for f in dataclasses.fields(self.algorithm)}),
        }

    @property
    def objects(self) -> dict[str, Any]:
        """The fields that a run folder may not be able to store, by argument of `Result.load`."""
        fields = {f.name: getattr(self.algorithm, f.name) for f in dataclasses.fields(self.algorithm)}
        code = code_names.code_of(fields)
        return {"env": self.env, "env_params": self.env_params} | {
            n: value for n, value in fields.items() if is_object(value) or n in code
        }

    @functools.cached_property
    def _data(self) -> dict[str, Any] | None:
        """Absolute path and SHA-256 of the data set, if there is one; without a path if it was passed as an object."""
        if self.dataset is None:
            return None
        path = self.algorithm.data
        if isinstance(path, data.Dataset):
            return {"path": None, "sha256": self.dataset.fingerprint()}
        is_file = os.path.exists(path)  # otherwise, the id of a data set in the library of its format
        return {"path": os.path.abspath(path) if is_file else os.fspath(path), "sha256": self.dataset.fingerprint()}

    @classmethod
    def from_json(
        cls,
        content: Mapping[str, Any],
        *,
        env: Environment | str | None = None,  # if it was an object or custom code
        env_params: GivenParams | None = None,  # if it was a function or a `Curriculum`
        data: Any = None,  # the data set; without it, the config has none
        where: str = "the run",  # in messages
        trust: bool = False,  # whether code that it names may run
        **objects: Any,  # fields of the config that were objects
    ) -> "Experiment":
        """Restores an experiment from the data that `to_json` returned.

        Raises RunFolderError if a part must be passed, or this version cannot read it; TrustError if it names code to run.
        """
        objects = {name: value for name, value in objects.items() if value is not None}
        try:
            passed_names = {"env", *objects} if env is not None else {*objects}
            check_trust(where, {name: text for name, text in code_of_run(content).items() if name not in passed_names}, trust)
            env_value: Any = content["env_spec"] if env is None else env
            if env_value is None:
                raise RunFolderError(f"{where} has an environment object ({content['env']}); pass it again: env=...")
            if env is None and not isinstance(env_value, str):
                raise TypeError(f"env_spec is {env_value!r}, which is not text")
            params = content["env_params"]
            if isinstance(params, str) and env_params is None:
                raise RunFolderError(f"{where} draws its env_params with a {params}; pass it again: env_params=...")
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in content["config"].items()}
            if unknown_names := objects.keys() - fields:
                name = min(unknown_names)
                raise RunFolderError(f"{where} has no {name}{suggestion(name, fields)}; give what was an object in its config")
            fields |= objects
            for name, value in fields.items():
                if isinstance(value, Mapping) and value.keys() == {"object"}:
                    article = "an" if name[0] in "aeiou" else "a"
                    raise RunFolderError(f"{where} has {article} {name} object ({value['object']}); pass it again: {name}=...")
            if data is not None:
                fields["data"] = data
            elif fields.get("data") is not None:  # check the rest of the config without a data set
                fields = {name: value for name, value in fields.items() if name not in ("data", "data_fraction")}
            return cls(
                algorithm=algorithms.get(algorithm_of(content))(**fields),
                env=env_value,
                seed=content["seed"],
                seeds=content["seeds"],
                total_steps=content["total_steps"],
                env_params=params if env_params is None else env_params,
                settings={name: tuple(map(float, values)) for name, values in (content["settings"] or {}).items()},
                pbt=None if content["pbt"] is None else read_pbt(content["pbt"]),
                rank_by=content["rank_by"],
                guard=content["guard"],
            )
        except (RunFolderError, TrustError):
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise RunFolderError(f"this version cannot read the config of {where}: {error}") from error

    def difference(self, other: "Experiment") -> tuple[str, Any, Any] | None:
        """Returns the first fact in which another experiment differs, with both values; None if they compute the same.

        Ignores lengths, because a run may be extended, and also guards and data sets.
        """
        return difference(self._plain_data(), other._plain_data())

    def about(self) -> dict[str, Any]:
        """Returns a description of the run for its data sets."""
        env = with_privileged(self.environment)
        space, actions = str(env.observation_space), str(env.action_space)
        about = {"env": self.env_name, "observation_space": space, "action_space": actions, **agents_of(env)}
        about |= {"made_by": f"training {self.name}", "seed": self.seed, "seeds": self.seeds}
        about |= {"settings": self.settings} if self.settings else {}
        return about | ({"pbt": self.pbt.to_json()} if self.pbt else {})
