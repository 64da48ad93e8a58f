"""`Result`: the history and state of a run, with methods to act, evaluate, save and load."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.agents.agent import innermost
from msrl_jax.configs.replacing import with_values
from msrl_jax.envs import Environment
from msrl_jax.envs.base import PyTree, close_simulators
from msrl_jax.envs.params import GivenParams
from msrl_jax.fragments.support.checks import check_seed, shown
from msrl_jax.fragments.support.random_keys import is_key, key_for
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.disk import store
from msrl_jax.run.evaluation.evaluate import MAX_STEPS, Behavior, Evaluation, make_evaluator
from msrl_jax.run.evaluation.history import final
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.experiment.members import UNRANKED, map_members, state_of_member
from msrl_jax.run.experiment.pbt import acting_part
from msrl_jax.run.outcome import Outcome


def _is_number(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Result(Outcome):
    """The result of a run. `C` denotes the number of chunks, `M` the number of members: seeds, settings of the config, or both.
    A run without members has no dimension `M`.

    Attributes:
      experiment: what the run computed.
      description: the experiment and where it ran, as plain data: the content of `config.json`.
      history: columns with one value per chunk: `step` and `iteration` (of one member), `seconds` since the start,
        `steps_per_second` (of all members, without compilation), every metric of the algorithm, `eval_return`, `eval_length`
        and, with several teams, `eval_return/TEAM` (nan for chunks without evaluation). A population that is trained also has
        `pbt/parent`, the member that each member copied at the last exploit before the chunk (its own number if it copied
        none), and `pbt/FIELD`, the hyperparameters in the chunk. shape=[C] or [C, M]
      run_state: the whole state at the end: `state`, wrapped in the states that the run adds, such as its count of iterations.
        A program continues from it, or from `msrl.Delayed(result.run_state, result.registers)` if the policy has staleness.
      status: "finished"; "stopped" by a callback; "interrupted" by a signal or the time limit; "diverged" if a metric was
        non-finite; "unfinished" for the folder of a run that is in progress or was killed; "earlier checkpoint" if the result
        was loaded at a checkpoint that is not the newest one.
      compile_seconds: time for tracing and compiling the training program and the initial state.
      wall_seconds: total time of the run, excluding saving.
      evaluation: the last evaluation, if there was one.
      registers: the parameters in transit to the actors at the end, if the policy has staleness.
      folder: the folder that holds the run; None if it has none, or if the run could not be saved anywhere.
      stop_reason: why the run was interrupted: "SIGINT" (Ctrl-C), "SIGTERM", "SIGHUP" or "time limit"; otherwise empty.
      timings: other parts of `wall_seconds`: `setup_seconds` (imports, building the agent, planning),
        `train_seconds`, and `evaluation_seconds` (including the compilation of the evaluation). The remaining time is spent
        on callbacks and metrics.
      save_error: why the run could not be saved in its own folder; empty if it was saved there, or has no folder. If set,
        `folder` is another folder, or None.
    """

    experiment: Experiment
    run_state: PyTree
    registers: tuple[jax.Array, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields to pickle, without the compiled programs that act."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def state(self) -> PyTree:
        """The algorithm's state at the end; if there are members, its leaves have a leading dimension `M`."""
        return innermost(self.run_state)

    @property
    def config(self) -> Any:
        """The config of the algorithm; that of the first member if members differ."""
        return self.experiment.algorithm

    @property
    def behavior(self) -> Behavior:
        """The behavior of one member."""
        return self.experiment.behavior

    @property
    def interrupted(self) -> bool:
        """Whether a signal (such as Ctrl-C) or the time limit ended the run."""
        return self.status == "interrupted"

    @property
    def has_members(self) -> bool:
        """Whether the state has a member axis: the run has several seeds, or config fields with several values."""
        return self.experiment.has_members

    @property
    def best(self) -> int:
        """The member with the highest mean return, or metric `rank_by`, in the last evaluation; without an evaluation, over the
        last tenth of training.

        In an offline run without `rank_by`, the best member has the smallest mean `validation_loss` over the last tenth of
        training instead.

        Raises:
          ValueError: if an offline run of several members has no validation episodes, or if teams oppose each other, so that
            returns do not rank the members.
        """
        if self.members == 1:
            return 0
        evaluation, rank_by = self.evaluation, self.experiment.rank_by
        if not self.experiment.is_ranked:
            raise ValueError(f"{UNRANKED}; choose one: member=0, or result.select(member=0)")
        if self.behavior.agent.unit == "updates" and rank_by == "return":
            if "validation_loss" not in self.history:
                raise ValueError(
                    "offline members are ranked by their validation loss, and this run has none; choose one, member=0, or "
                    "train with a validation_fraction above 0"
                )
            scores = -np.atleast_1d(self.final("validation_loss"))
        else:
            scores = np.atleast_1d(
                final(self.history, f"episode_{rank_by}") if evaluation is None else evaluation.means[f"eval_{rank_by}"]
            )
        return 0 if np.isnan(scores).all() else int(np.nanargmax(scores))

    def member(self, member: int | None = None) -> int:
        """Checks and returns the index of a member: from 0 to `members - 1`, or None for the best one.

        Raises:
          ValueError: if the run has no such member.
        """
        if member is None:
            return self.best
        if not _is_number(member) or not 0 <= member < self.members:
            members = "only member 0" if self.members == 1 else f"members 0 to {self.members - 1}"
            raise ValueError(f"member={shown(member)}: this run has {members}; use one of them, or None for the best one")
        return int(member)

    @entry
    def member_state(self, member: int | None = None) -> PyTree:
        """Returns the state of one member; None selects the best one.

        Raises:
          ValueError: if the run has no such member.
        """
        return innermost(self.acting_state(member))

    def acting_state(self, member: int | None = None) -> PyTree:
        """Returns the state of one member in the form that `behavior` takes: `member_state`, wrapped as in `run_state`."""
        number, state = self.member(member), acting_part(self.run_state)
        return state_of_member(self.behavior.agent, state, number) if self.has_members else state

    @entry
    def select(self, settings: Sequence[int] | None = None, *, member: int | None = None) -> "Result":
        """Selects some members as the result of a separate run; save it to resume it: `train(resume=...)`.

        Args:
          settings: indices of settings of the config, which keep all their seeds; None selects one member.
          member: the index of that member; None selects the best one.

        Returns:
          The result. One member of a run whose config has only constants becomes a run of one seed, without a member axis.

        Raises:
          ValueError: if the run has no such settings or member, or if both are given.
        """
        if settings is not None and member is not None:
            raise ValueError(f"settings={shown(settings)} and member={shown(member)} are both given; give one")
        values_by_field = self.experiment.settings
        if settings is not None:
            count = len(next(iter(values_by_field.values()))) if values_by_field else 0
            indices: list[Any] = np.atleast_1d(np.asarray(settings, object)).tolist()
            if not indices or len(set(indices)) < len(indices) or not all(_is_number(x) and 0 <= x < count for x in indices):
                choices = f"settings 0 to {count - 1}" if count else "only one setting; select a seed with select(member=0)"
                raise ValueError(f"settings={shown(settings)}: this run has {choices}; list at least one of them, each once")
            rows = np.array([s * self.seeds + i for s in indices for i in range(self.seeds)])
            return self._select_rows(
                rows, settings={name: tuple(values[s] for s in indices) for name, values in values_by_field.items()}
            )
        number = self.member(member)
        if not self.has_members:
            return self
        setting = dict(self.settings[number])
        changes = {"seed": setting.pop("seed"), "seeds": 1, "settings": {name: (x,) for name, x in setting.items()}}
        return self._select_rows(np.array([number]) if setting else number, **changes)

    def _select_rows(self, rows: np.ndarray | int, **changes: Any) -> "Result":
        """Returns the result of some members; `changes` are applied to the experiment."""
        if self.experiment.pbt:
            raise ValueError("select does not support pbt, whose members evolve together; pass member= to act and evaluate")
        algorithm = with_values(self.config, {name: values[0] for name, values in changes["settings"].items()})
        return join_members([(self, rows)], self.experiment.replaced(**changes, algorithm=algorithm))

    @functools.cached_property
    def _compiled_functions(self) -> tuple[Callable[..., tuple[jax.Array, PyTree]], Callable[..., jax.Array]]:
        """`act_with_carry` and `probabilities` of `behavior`, compiled; they take the index of a member."""
        behavior, many, leaves = self.behavior, self.has_members, self.behavior.take(acting_part(self.run_state))

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            def of_member(leaves: list[jax.Array], member: int, *args: Any) -> Any:
                return function(behavior.restore([x[member] for x in leaves] if many else leaves), *args)

            return functools.partial(jax.jit(of_member), leaves)

        return compiled(behavior.act_with_carry), compiled(behavior.probabilities)

    @entry
    def act(self, obs: PyTree, key: jax.Array | None = None, *, member: int | None = None) -> jax.Array:
        """Chooses actions for raw observations of the environment.

        Args:
          obs: one observation, or a batch with a leading dimension `B`. It is normalized with the statistics of training if
            training normalizes. Pass a `MaskedObservation` if the environment has action masks.
          key: key for sampling the action; None selects the most probable one.
          member: index of the member that acts; None selects the best one.

        Returns:
          The action, or the actions `[B, ...]`.

        Raises:
          ValueError: if `obs` has neither the shape of an observation nor that of a batch, if it has no legal action, if the
            run has no such member, or if the agent is recurrent; use `act_with_carry` for recurrent agents.
        """
        if self.behavior.agent.is_recurrent:
            raise ValueError(
                f"the agent of {self.experiment.name!r} is recurrent, so act needs the carry of earlier observations; "
                "use action, carry = result.act_with_carry(obs, carry), with carry=None at the start of an episode"
            )
        return self.act_with_carry(obs, None, key, member=member)[0]

    @entry
    def act_with_carry(
        self, obs: PyTree, carry: PyTree = None, key: jax.Array | None = None, *, member: int | None = None
    ) -> tuple[jax.Array, PyTree]:
        """Chooses actions for raw observations with the carry of a recurrent agent; for other agents, the carry is empty.

        Args:
          obs: as in `act`.
          carry: None at the start of an episode; afterwards, the carry that the previous call returned.
          key: as in `act`.
          member: as in `act`.

        Returns:
          The action, or the actions `[B, ...]`, and the carry for the next step.

        Raises:
          ValueError: as in `act`, or if the carry does not fit the number of observations.
        """
        obs, single = self.behavior.batched(obs)
        if key is not None and (not is_key(key) or key.shape != ()):
            raise TypeError(f"act needs one typed key, got key={shown(key)}; make it with jax.random.key(seed)")
        count = jax.tree.leaves(obs)[0].shape[0]
        carry = self.behavior.checked_carry(carry, count)
        actions, carry = self._compiled_functions[0](self.member(member), obs, carry, key)
        return (actions[0] if single else actions), carry

    @entry
    def probabilities(self, obs: PyTree, *, member: int | None = None) -> jax.Array:
        """Returns the probabilities with which `act` chooses discrete actions when it has a key.

        Args:
          obs: as in `act`.
          member: as in `act`.

        Returns:
          The probabilities of the `N` actions, float32: `[N]`, or `[B, N]`; `[A, N]` or `[B, A, N]` if there are `A` agents.
          If an action is `K` integers of at most `N` values, the last dimensions are `[K, N]`; the integers are independent.

        Raises:
          ValueError: if the agent has no categorical policy (PPO, A2C, A3C and IMPALA have one for discrete actions, alone or
            for several agents) or is recurrent, or as in `act`.
        """
        obs, single = self.behavior.batched(obs)
        probabilities = self._compiled_functions[1](self.member(member), obs)
        return probabilities[0] if single else probabilities

    @entry
    def evaluate(
        self,
        episodes: int = 128,
        seed: int = 0,
        *,
        member: int | None = None,
        max_steps: int = MAX_STEPS,
        env_params: GivenParams | None = None,
    ) -> Evaluation:
        """Plays greedy episodes in parallel.

        Args:
          episodes: number of episodes.
          seed: seed for the randomness of the environments.
          member: index of the member that plays; None selects the best one.
          max_steps: maximum length of an episode, in steps.
          env_params: distributions of the environment's parameters, as in `train`. None uses the distributions of the run at
            its end; `{}` keeps all parameters constant.

        Returns:
          The returns and lengths of the episodes.

        Raises:
          ValueError: if a number is out of range, or the run has no such member.
        """
        evaluator = make_evaluator(self.behavior.with_env_params(env_params), episodes, max_steps=max_steps)
        try:
            return evaluator(self.acting_state(member), key_for("play", jax.random.key(check_seed(seed))))
        finally:
            close_simulators(evaluator.env)

    @entry
    def save(self, path: str | os.PathLike) -> Path:
        """Writes the run to a new folder, for `Result.load`.

        Args:
          path: a folder that does not exist or is empty.

        Returns:
          The path of the folder.

        Raises:
          ValueError: if `path` exists and is not an empty folder.
        """
        return store.save(self, Path(path))

    @classmethod
    @entry
    def load(
        cls,
        path: str | os.PathLike,
        *,
        env: Environment | str | None = None,
        env_params: GivenParams | None = None,
        checkpoint: Literal["newest", "best"] | int = "newest",
        trust: bool = False,
        **objects: Any,
    ) -> "Result":
        """Reads a run from its folder, also while the run is in progress or after it was killed.

        Args:
          path: a folder that `save`, `train(out=...)` or the command line wrote.
          env: the environment, if `train` got an environment object, or the name of one in a module.
          env_params: the distributions of its parameters, if `train` got a function or a `Curriculum`.
          checkpoint: which one to read: "newest", the newest intact one; "best", the one with the best score; or the one after
            this number of iterations.
          trust: whether to allow the code that the folder names to run: modules (`my_module:MyEnv`) and files of algorithms.
            Set it for your own folders and for those of people whose code you would run; or pass the named objects again.
          **objects: config fields that are objects or names in modules, if `train` got such: `network=`, `optimizer=`.

        Returns:
          The result of the run up to the checkpoint, with its state on the default device. An offline run is loaded without
          its data (`config.data` is None; `description["config"]` describes them); it can act and be evaluated as before.

        Raises:
          RunFolderError: a ValueError, if the folder holds no run, a damaged one, or one that this version cannot read.
          TrustError: a ValueError, if the folder names code to run and is not trusted.
        """
        return cls(**store.load(Path(path), env, env_params, checkpoint, objects, trust))


def join_members(parts: Sequence[tuple[Result, np.ndarray | slice | int]], experiment: Experiment) -> Result:
    """Makes a run from `parts`, pairs of a run and its rows of members; all of them have the same number of chunks."""
    run, agent = parts[0][0], parts[0][0].behavior.agent

    def rows_of(*xs: Any) -> Any:
        parts_of_members = [x[rows] for x, (_, rows) in zip(xs, parts, strict=True)]
        if len(parts_of_members) == 1:
            return parts_of_members[0]
        return (jnp if isinstance(parts_of_members[0], jax.Array) else np).concatenate(parts_of_members)

    def of_run(run: Result) -> Any:
        """Returns all values with a leading dimension of members, except the state."""
        columns = {name: x.T for name, x in run.history.items() if x.ndim > 1}
        return columns, run.registers, vars(run.evaluation) if evaluated else None

    evaluated = all(run.evaluation is not None for run, _ in parts)
    columns, registers, evaluation = jax.tree.map(rows_of, *(of_run(run) for run, _ in parts))
    states = [agent.without_data(run.run_state) for run, _ in parts]
    about = experiment.to_json()
    if about["data"] is None:  # keep the description of a loaded result's data set
        about |= {"data": run.description["data"]}
        about["config"] |= {"data": run.description["config"]["data"]} if "data" in about["config"] else {}
    return dataclasses.replace(
        run,
        experiment=experiment,
        description={**run.description, **about},
        folder=None,
        history={name: columns[name].T if name in columns else x for name, x in run.history.items()},
        run_state=agent.with_data(map_members(rows_of, *states)),
        registers=registers,
        evaluation=Evaluation(**evaluation) if evaluated else None,
    )
