"""Population based training: the search and its options, exploit and explore as pure functions, and training with both.

In the shape descriptions, `M` denotes the number of members.
"""

import dataclasses
import functools
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax import algorithms
from msrl_jax.agents.agent import Agent, Metrics, Progress, innermost, with_innermost
from msrl_jax.agents.transformations import Counted
from msrl_jax.configs.names import all_fields, tunable_fields
from msrl_jax.configs.replacing import replace_options
from msrl_jax.envs import param_distributions
from msrl_jax.envs.base import PyTree
from msrl_jax.envs.param_distributions import ParamDistribution, ParamRamp
from msrl_jax.fragments import fragment
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.checks import shown, suggestion, whole
from msrl_jax.fragments.support.text_values import read_values
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.evaluation.history import in_words
from msrl_jax.run.experiment.members import UNRANKED, Member, learned_fields, with_learned_fields

PARENT = "pbt/parent"  # the metric with the member that each member copied at the last exploit; its own number if none
FACTORS = 0.8, 1.2  # factors by which perturbation multiplies a number

_NUMBER = jax.ShapeDtypeStruct((), jnp.float32)  # the type of a hyperparameter
_WORDS = {"exploit": ("truncation", "tournament"), "explore": ("perturb", "resample")}
_INITIAL, _MEMBER = 1711_09846, 0x9B7  # separate the draws of initial values and of members from other uses of the seed


@entry
@dataclasses.dataclass(frozen=True)
class PBT:
    """Population based training (Jaderberg et al., 2017, arXiv 1711.09846): members copy better ones and change what they copy.

    Every `every` iterations, a member may copy the parameters, optimizer state, environment statistics and hyperparameters of
    another member (exploit). If it does, it then changes these hyperparameters (explore). It keeps its own environments, replay
    buffers and keys.

    Attributes:
      search: config field -> `envs.uniform`, `envs.log_uniform` or `envs.choice`, also as text. The range is split into
        `members` equally probable parts; each member starts with a value from a different part. Explored values stay in
        the range.
      members: size of the population, `M`; usually 8 to 80. Member `i` has the seed `seed + i`.
      every: iterations between two exploits.
      exploit: "truncation": each member of the worst `fraction` copies a random member of the best `fraction`. "tournament":
        each member draws another one, and copies it if it is better.
      fraction: fraction of the members that truncation replaces, at most a half; at least one member is replaced.
      explore: "perturb" multiplies each hyperparameter by 0.8 or 1.2, or moves to a neighboring option of a `choice`.
        "resample" redraws each hyperparameter with probability `resample_probability`, and otherwise keeps it.
      resample_probability: probability of redrawing a hyperparameter.
      min_episodes: a member is not ready if it has finished fewer episodes than this since it was last compared: it is neither
        replaced nor copied, and the others do not wait for it.
    """

    search: Mapping[str, ParamDistribution] = dataclasses.field(hash=False)
    members: int = 8
    every: int = 20
    exploit: Literal["truncation", "tournament"] = "truncation"
    fraction: float = 0.2
    explore: Literal["perturb", "resample"] = "perturb"
    resample_probability: float = 0.25
    min_episodes: int = 1

    def __post_init__(self):
        if not isinstance(self.search, Mapping) or not self.search:
            raise ValueError(
                f"PBT.search={shown(self.search)}: name at least one field of the config, such as "
                "search={'learning_rate': msrl.envs.log_uniform(1e-5, 1e-2)}"
            )
        for name, minimum in (("members", 2), ("every", 1), ("min_episodes", 1)):
            object.__setattr__(self, name, whole(f"PBT.{name}", getattr(self, name), minimum))
        for name, options in _WORDS.items():
            if (word := getattr(self, name)) not in options:
                hint = suggestion(word, options) if isinstance(word, str) else ""
                raise ValueError(f"PBT.{name}={word!r}{hint}; use one of {', '.join(options)}")
        for name, maximum in (("fraction", 0.5), ("resample_probability", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) <= maximum:
                raise ValueError(f"PBT.{name}={value!r}: use a number above 0 and at most {maximum:g}")
            object.__setattr__(self, name, float(value))
        object.__setattr__(
            self, "search", {name: _check_distribution(name, distribution) for name, distribution in self.search.items()}
        )

    def check(self, base: Any, overrides: Mapping[str, Any]) -> None:
        """Checks the search against a config."""
        kind, chosen = type(base).__name__, replace_options(base, overrides)
        tunable = tunable_fields(chosen)
        for name in self.search:
            if name not in tunable:
                fact = f"{kind} has no field {name!r}{suggestion(name, tunable)}"
                if name in all_fields(chosen):
                    fact = f"{name} of {kind} changes the shapes or control flow of the program"
                elif name in all_fields(type(base)):
                    fact = f"{name} belongs to an option that this {kind} does not use"
                raise ValueError(f"PBT.search: {fact}; it can search {', '.join(tunable) or 'nothing'}")
        fixed = {name: value for name, value in overrides.items() if name not in self.search}
        for name, value in overrides.items():
            several = np.ndim(value) == 1 if isinstance(value, list | tuple | range | np.ndarray | jax.Array) else False
            if name in self.search and not (several and len(value) == self.members):
                raise ValueError(
                    f"{name}={shown(value)}: PBT.search sets this field; leave it out, or give an initial value for each "
                    f"of the {self.members} members"
                )
            if name in self.search:
                self._check_initial(name, value)
            elif name in tunable and several:
                raise ValueError(
                    f"{name}={shown(value)}: this field has several values, but is not in PBT.search; add it there, or give "
                    "one number"
                )
        for name, distribution in self.search.items():
            for value in distribution.numbers:
                try:
                    algorithms.make(base, {**fixed, name: value})
                except ValueError as error:
                    raise ValueError(f"PBT.search: {in_words({name: value})} of {name}={distribution}: {error}") from None

    def _check_initial(self, name: str, values: Iterable[object]) -> None:
        distribution = self.search[name]
        options = np.asarray(distribution.numbers, np.float32)
        for member, number in enumerate(values):
            if not isinstance(number, numbers.Real | np.generic | jax.Array):
                continue  # values that are not numbers are rejected with the other fields
            value = np.float32(number)  # the dtype that members use
            if not options.min() <= value <= options.max() or (distribution.kind == "choice" and value not in options):
                raise ValueError(
                    f"{name}={value:g} of member {member} is outside PBT.search, {distribution}; give an initial value "
                    "inside it, or a wider range"
                )

    def initial(self, seed: int) -> dict[str, tuple[float, ...]]:
        """Returns the initial values of all members, `[M]` by field."""
        random = np.random.default_rng([_INITIAL, seed])
        initial_values = {}
        for name in sorted(self.search):
            quantiles = (random.permutation(self.members) + random.random(self.members)) / self.members
            kind, options = self.search[name].kind, np.asarray(self.search[name].numbers)
            if kind == "choice":
                values = options[(quantiles * len(options)).astype(int)]
            else:
                low, high = np.log(options) if kind == "log_uniform" else options
                values = low + quantiles * (high - low)
                values = np.clip(np.exp(values) if kind == "log_uniform" else values, *options)
            initial_values[name] = tuple(map(float, values.astype(np.float32)))
        return initial_values

    def to_json(self) -> dict[str, Any]:
        """Returns the specification as plain data, for `read_pbt`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {
            "search": {name: param_distributions.text(distribution) for name, distribution in sorted(self.search.items())}
        }


GivenPBT: TypeAlias = PBT | Mapping[str, Any] | str
"""A specification; or its fields; or these as text, where every other name is a field of `search`:
`"members=8,every=20,learning_rate=log_uniform:1e-5:1e-2"`."""


def read_pbt(given: GivenPBT) -> PBT:
    """Reads a specification."""
    if isinstance(given, PBT):
        return given
    fields = [field.name for field in dataclasses.fields(PBT)]
    if isinstance(given, str):
        wrong = f"cannot read {given!r} as parameters; write name=value,name=uniform:0.25:1"
        values = read_values(given, param_distributions.CALLS, wrong=wrong)
        parameters = {name: value for name, value in values.items() if name not in fields}
        search = {
            name: value
            for name, value in parameters.items()
            if isinstance(value, ParamDistribution) or not suggestion(name, fields)
        }
        given = {"search": search, **{name: value for name, value in values.items() if name not in search}}
    if not isinstance(given, Mapping):
        raise TypeError(f"pbt={shown(given)}: give msrl.PBT(search=..., members=..., every=...)")
    for name in given:
        if name not in fields:
            raise ValueError(f"pbt has no field {name!r}{suggestion(str(name), fields)}; its fields are {', '.join(fields)}")
    return PBT(**{"search": {}, **given})


def _check_distribution(name: str, value: object) -> ParamDistribution:
    """Returns a checked distribution, with Python numbers."""
    place = f"PBT.search[{name!r}]"
    value = param_distributions.parse_param(place, value) if isinstance(value, str) else value
    if not isinstance(value, ParamDistribution):
        raise ValueError(
            f"{place}={shown(value)} is not a distribution; use msrl.envs.uniform(low, high), log_uniform(low, high) or "
            "choice([...])"
        )
    if any(isinstance(x, ParamRamp) for x in value.numbers):
        raise ValueError(f"{place}={value}: a range cannot follow a ramp; use numbers")
    param_distributions.cast(place, value, _NUMBER)
    options = tuple(sorted({float(x) for x in value.numbers})) if value.kind == "choice" else tuple(map(float, value.numbers))
    if options[0] == options[-1]:
        raise ValueError(f"{place}={value} has only one value; pass it to train as {name}={options[0]:g}")
    return ParamDistribution(value.kind, options)


class Standing(NamedTuple):
    """The ranking data of the members."""

    score_sum: jax.Array  # sum of the scores since a member was last compared. shape=(M,), dtype=float32
    num_scores: jax.Array  # number of these scores. shape=(M,), dtype=float32
    since: jax.Array  # iterations since the last exploit. shape=(), dtype=int32
    parent: jax.Array  # the member that each one copied at the last exploit; its own number if none. shape=(M,), dtype=int32
    key: jax.Array  # a typed key of each member, for both steps. shape=(M,)


def exploit(pbt: PBT, score: jax.Array, ready: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns the member that each one copies: a better one, or itself. Only members that are `ready` take part. `[M]`"""
    order = jnp.arange(pbt.members)
    score = jnp.where(ready, score, -jnp.inf)
    tie, draws = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    lot = jax.vmap(jax.random.bits)(tie)  # break ties at random, so that the same members are not replaced each time
    is_worse = (score[None] < score[:, None]) | ((score[None] == score[:, None]) & (lot[None] < lot[:, None]))
    rank = jnp.sum(is_worse & ready[None], axis=1)  # among the members that are ready; the worst has 0
    count = jnp.sum(ready)
    if pbt.exploit == "truncation":
        replaced = jnp.asarray([max(1, int(pbt.fraction * n + 1e-9)) for n in range(pbt.members + 1)])[count]
        rank_to_copy = count - 1 - _draw_below(draws, replaced)
        takes_part = ready & (rank < replaced)
    else:
        other = _draw_below(draws, count - 1)
        rank_to_copy = other + (other >= rank)
        takes_part = ready
    candidate = jnp.argmax(ready[None] & (rank[None] == rank_to_copy[:, None]), axis=1)
    return jnp.where(takes_part & (count > 1) & (score[candidate] > score), candidate, order).astype(jnp.int32)


def _draw_below(keys: jax.Array, bound: jax.Array) -> jax.Array:
    """Draws a random number below a bound for each key, `[M]`."""
    return jax.vmap(lambda key: jax.random.randint(key, (), 0, jnp.maximum(bound, 1)))(keys)


def explore(pbt: PBT, values: Mapping[str, jax.Array], keys: jax.Array) -> dict[str, jax.Array]:
    """Changes the hyperparameters of the members, `[M]` float32 by field, within the ranges of the search."""

    def change(distribution: ParamDistribution, value: jax.Array, key: jax.Array) -> jax.Array:
        options = distribution.numbers
        if pbt.explore == "resample":
            redraw_key, value_key = jax.random.split(key)
            redrawn = param_distributions.draw_param(distribution, value_key, _NUMBER, ())
            return jnp.where(jax.random.bernoulli(redraw_key, pbt.resample_probability), redrawn, value)
        up = jax.random.bernoulli(key)
        if distribution.kind == "choice":
            nearest = jnp.argmin(jnp.abs(jnp.asarray(options) - value))
            return jnp.asarray(options, jnp.float32)[jnp.clip(nearest + jnp.where(up, 1, -1), 0, len(options) - 1)]
        return jnp.clip(value * jnp.where(up, FACTORS[1], FACTORS[0]), min(options), max(options))

    field_keys = {name: jax.vmap(functools.partial(jax.random.fold_in, data=i))(keys) for i, name in enumerate(sorted(values))}
    return {
        name: jax.vmap(functools.partial(change, pbt.search[name]))(value, field_keys[name]) for name, value in values.items()
    }


class Evolving(NamedTuple):
    """The state of a population that is trained."""

    inner: Member  # the state of the members
    standing: Standing


def acting_part(state: PyTree) -> PyTree:
    """Returns the part of a run's state needed for acting: the whole state of the agent of a member."""
    while isinstance(state, Counted | Evolving):
        state = state.inner
    return state


def evolve(agent: Agent, pbt: PBT, rank_by: str = "return") -> Agent:
    """Makes a population that is trained (Jaderberg et al., 2017, arXiv 1711.09846, algorithm 1); `rank_by` as in `Experiment`.

    The decision is a fragment of the server. The values that members copy stay where they are computed. A `cond` outside
    fragments copies each state field that learners compute, because a policy may keep some fields on the server and others
    with the learner. A separate fragment copies the statistics of the environments, where these are. So iterations without an
    exploit transfer only the scores and the decision.
    """
    if rank_by == "return" and not agent.ranked:
        raise ValueError(f"pbt: {UNRANKED}; train without pbt, or with rank_by= a metric of the environment")
    if rank_by != "return" and agent.unit == "updates":
        raise ValueError(
            f"pbt: rank_by={rank_by!r} is a metric of episodes, but offline training plays no episodes; leave rank_by out to "
            "rank members by their validation loss"
        )
    order = jnp.arange(pbt.members, dtype=jnp.int32)
    # Every device knows when an exploit is due; until then, everything else stays with its member.
    axes = Evolving(agent.axes, Standing(*[P("member")] * 5)._replace(since=P()))  # type: ignore[arg-type]

    def init(keys: jax.Array) -> Evolving:
        zeros = jnp.zeros(pbt.members)
        keys_of_members = jax.vmap(lambda key: jax.random.fold_in(key, _MEMBER))(keys)
        return Evolving(agent.init(keys), Standing(zeros, jnp.copy(zeros), jnp.int32(0), order, keys_of_members))

    @fragment(role="server")
    def decide(standing: Standing, score: Mean, values: Mapping[str, jax.Array]):
        report = {PARENT: standing.parent.astype(jnp.float32)} | {f"pbt/{name}": value for name, value in values.items()}
        updated = standing._replace(
            score_sum=standing.score_sum + score.total, num_scores=standing.num_scores + score.count, since=standing.since + 1
        )
        is_due = updated.since >= pbt.every

        def select(updated: Standing, values: Mapping[str, jax.Array]):
            mean = updated.score_sum / jnp.maximum(updated.num_scores, 1)
            ready = (updated.num_scores >= pbt.min_episodes) & jnp.isfinite(mean)
            keys = jax.vmap(lambda key: jax.random.split(key, 3))(updated.key)
            parent = exploit(pbt, mean, ready, keys[:, 0])
            copied = {name: x[parent] for name, x in values.items()}
            explored = explore(pbt, copied, keys[:, 1])
            values = {name: jnp.where(parent == order, x, explored[name]) for name, x in values.items()}
            is_compared = ready | ~jnp.isfinite(mean)  # otherwise one nan would exclude a member forever
            score_sum, num_scores = (jnp.where(is_compared, 0, x) for x in (updated.score_sum, updated.num_scores))
            return Standing(score_sum, num_scores, jnp.zeros_like(updated.since), parent, keys[:, 2]), values

        updated, values = jax.lax.cond(is_due, select, lambda now, values: (now, dict(values)), updated, dict(values))
        return updated, values, is_due, report

    def copied(x: Any, parent: jax.Array, is_due: jax.Array) -> Any:
        with jax.named_scope("exploit"):
            return jax.lax.cond(is_due, lambda x: jax.tree.map(lambda leaf: leaf[parent], x), lambda x: x, x)

    copy_statistics = fragment(role="env", name="copy_statistics")(copied)

    def iteration(state: Evolving, progress: Progress) -> tuple[Evolving, Metrics]:
        next_members, metrics = agent.iteration(state.inner, progress)
        standing, values, is_due, report = decide(state.standing, _score(agent, metrics, rank_by), state.inner.numbers)
        inner = innermost(next_members)
        next_members = with_learned_fields(
            next_members,
            {field: copied(x, standing.parent, is_due) for field, x in learned_fields(agent, next_members).items()},
        )
        if inner.env_state != () and jax.tree.leaves(statistics := agent.env.statistics(inner.env_state)):
            env_state = agent.env.with_statistics(inner.env_state, copy_statistics(statistics, standing.parent, is_due))
            next_members = with_innermost(next_members, innermost(next_members)._replace(env_state=env_state))
        return Evolving(next_members._replace(numbers=values), standing), {**metrics, **report}

    return dataclasses.replace(agent, init=init, iteration=iteration, axes=axes)


def _score(agent: Agent, metrics: Metrics, rank_by: str) -> Mean:
    """Returns the score of every member in an iteration, as sums and counts `[M]`; higher is better."""
    if agent.unit != "updates":
        if (name := f"episode_{rank_by}") not in metrics:
            raise ValueError(f"pbt compares members by {name}, which is not among {', '.join(metrics)} of the algorithm")
        score = metrics[name]
        assert isinstance(score, Mean)
        return score
    if "validation_loss" not in metrics:
        raise ValueError("pbt ranks offline members by their validation loss; train with a validation_fraction above 0")
    loss: Any = metrics["validation_loss"]
    return Mean(-loss.total, loss.count) if isinstance(loss, Mean) else Mean(-loss, jnp.ones_like(loss))
