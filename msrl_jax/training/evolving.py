"""Population based training on devices: exploit and explore as pure functions, and the population that applies them.

In the shape descriptions, `M` denotes the number of members.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms import Agent
from msrl_jax.algorithms.base import Metrics
from msrl_jax.envs import distributions
from msrl_jax.fragments import fragment
from msrl_jax.metrics import Mean
from msrl_jax.training.hyperparameters import FIELD
from msrl_jax.training.pbt import NUMBER, PBT
from msrl_jax.training.skipping import learned

STANDING = "pbt"
"""The field of a state that holds the `Standing`."""

PARENT = "pbt/parent"
"""The metric that tells whom each member copied at the last exploit; its own number if nobody."""

FACTORS = 0.8, 1.2
"""What perturbation multiplies a number by."""

_SALT = 0x9B7


class Standing(NamedTuple):
    """How the members stand; without the dimension `M` in the state of one member.

    Attributes:
      score_sum: sum of the scores since a member was last compared. shape=(M,), dtype=float32
      num_scores: number of these scores. shape=(M,), dtype=float32
      since: iterations since the last exploit, the same for all members. shape=(M,), dtype=int32
      parent: the member that each one copied at the last exploit; its own number if nobody. shape=(M,), dtype=int32
      key: a typed key of each member, for both steps. shape=(M,)
    """

    score_sum: jax.Array
    num_scores: jax.Array
    since: jax.Array
    parent: jax.Array
    key: jax.Array


def exploit(pbt: PBT, score: jax.Array, ready: jax.Array, keys: jax.Array) -> jax.Array:
    """Chooses whom each member copies.

    Args:
      pbt: the specification.
      score: more is better. shape=(M,), dtype=float32
      ready: the members that take part. shape=(M,), dtype=bool
      keys: a typed key for each member. shape=(M,)

    Returns:
      The numbers of the members to copy; a member copies itself unless the other one is better. shape=(M,), dtype=int32
    """
    numbers = jnp.arange(pbt.members)
    score = jnp.where(ready, score, -jnp.inf)
    tie, draws = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    lot = jax.vmap(jax.random.bits)(tie)  # equals are ranked at random, lest the same ones be replaced each time
    behind = (score[None] < score[:, None]) | ((score[None] == score[:, None]) & (lot[None] < lot[:, None]))
    rank = jnp.sum(behind & ready[None], axis=1)  # among those that are ready; the worst has 0
    count = jnp.sum(ready)
    if pbt.exploit == "truncation":
        replaced = jnp.asarray([max(1, int(pbt.fraction * n + 1e-9)) for n in range(pbt.members + 1)])[count]
        wanted = count - 1 - _below(draws, replaced)
        takes_part = ready & (rank < replaced)
    else:
        other = _below(draws, count - 1)
        wanted = other + (other >= rank)
        takes_part = ready
    found = jnp.argmax(ready[None] & (rank[None] == wanted[:, None]), axis=1)
    return jnp.where(takes_part & (count > 1) & (score[found] > score), found, numbers).astype(jnp.int32)


def _below(keys: jax.Array, bound: jax.Array) -> jax.Array:
    """A random number below a bound for each key, `[M]`."""
    return jax.vmap(lambda key: jax.random.randint(key, (), 0, jnp.maximum(bound, 1)))(keys)


def explore(pbt: PBT, values: Mapping[str, jax.Array], keys: jax.Array) -> dict[str, jax.Array]:
    """Changes hyper-parameters.

    Args:
      pbt: the specification.
      values: the hyper-parameters by field. shape=(M,), dtype=float32
      keys: a typed key for each member. shape=(M,)

    Returns:
      New values, in the ranges of the search. shape=(M,), dtype=float32
    """
    change = _resampled if pbt.explore == "resample" else _perturbed
    own = {name: jax.vmap(functools.partial(jax.random.fold_in, data=i))(keys) for i, name in enumerate(sorted(values))}
    return {name: jax.vmap(functools.partial(change, pbt, name))(value, own[name]) for name, value in values.items()}


def _perturbed(pbt: PBT, name: str, value: jax.Array, key: jax.Array) -> jax.Array:
    up, options = jax.random.bernoulli(key), pbt.search[name].numbers
    if pbt.search[name].kind == "choice":
        nearest = jnp.argmin(jnp.abs(jnp.asarray(options) - value))
        return jnp.asarray(options, jnp.float32)[jnp.clip(nearest + jnp.where(up, 1, -1), 0, len(options) - 1)]
    return jnp.clip(value * jnp.where(up, FACTORS[1], FACTORS[0]), *pbt.limits(name))


def _resampled(pbt: PBT, name: str, value: jax.Array, key: jax.Array) -> jax.Array:
    which, draw = jax.random.split(key)
    new = distributions.draw(pbt.search[name], draw, NUMBER, ())
    return jnp.where(jax.random.bernoulli(which, pbt.resample_probability), new, value)


@functools.cache
def _with_standing(state: type) -> Any:
    """The state of an agent with one more field."""
    return collections.namedtuple(state.__name__, (*state._fields, STANDING))  # type: ignore[attr-defined]


def standing(agent: Agent) -> Agent:
    """One member of a population that is trained: its state has one more field, `pbt`, which it leaves as it is.

    Args:
      agent: an agent with hyper-parameters in its state.

    Returns:
      The agent, for `population` and then `evolving`.

    Raises:
      ValueError: if returns do not tell which member is better.
    """
    if not agent.ranked:
        raise ValueError(
            "pbt: the return is the sum over teams or players that oppose each other, and does not tell which member is "
            "better; train without pbt"
        )
    kind = type(agent.axes)
    larger = _with_standing(kind)

    def own(state: Any) -> Any:
        return kind(*state[:-1])

    def init(key: jax.Array, *values: Any) -> Any:
        zero, none = jnp.float32(0), jnp.int32(0)
        return larger(*agent.init(key, *values), Standing(zero, zero, none, none, jax.random.fold_in(key, _SALT)))

    def iteration(state: Any) -> tuple[Any, Metrics]:
        after, metrics = agent.iteration(own(state))
        return larger(*after, getattr(state, STANDING)), metrics

    probabilities = agent.probabilities
    return dataclasses.replace(
        agent, init=init, iteration=iteration, axes=larger(*agent.axes, P()),
        act=lambda state, *args: agent.act(own(state), *args),
        probabilities=None if probabilities is None else lambda state, obs: probabilities(own(state), obs),
    )  # fmt: skip


def evolving(agent: Agent, pbt: PBT) -> Agent:
    """A population that is trained (Jaderberg et al., 2017, arXiv 1711.09846, algorithm 1).

    The decision is a fragment of the server. What members copy stays where it is made: each field of the state that learners
    compute is a `cond` outside of fragments, because a policy may keep some fields on the server and others with the learner;
    statistics of the environments are copied by a fragment of theirs. So iterations without an exploit move the scores and the
    decision only.

    Args:
      agent: the population of agents with a `Standing`.
      pbt: the specification.

    Returns:
      The agent. Its metrics tell the lineage, `pbt/parent`, and the values in effect, `pbt/FIELD`. `[M]`
    """
    numbers = jnp.arange(pbt.members, dtype=jnp.int32)
    # Every device knows when it is time; everything else stays with its member until then.
    axes = agent.axes._replace(**{STANDING: Standing(*[P("member")] * 5)._replace(since=P())})  # type: ignore[arg-type]

    def init(keys: jax.Array) -> Any:
        state = agent.init(keys)
        return state._replace(**{STANDING: getattr(state, STANDING)._replace(parent=numbers)})

    @fragment(role="server")
    def decide(standing: Standing, score: Mean, values: Mapping[str, jax.Array]):
        report = {PARENT: standing.parent.astype(jnp.float32)} | {f"pbt/{name}": value for name, value in values.items()}
        now = standing._replace(
            score_sum=standing.score_sum + score.total, num_scores=standing.num_scores + score.count, since=standing.since + 1
        )
        due = now.since[0] >= pbt.every

        def select(now: Standing, values: Mapping[str, jax.Array]):
            mean = now.score_sum / jnp.maximum(now.num_scores, 1)
            ready = (now.num_scores >= pbt.min_episodes) & jnp.isfinite(mean)
            keys = jax.vmap(lambda key: jax.random.split(key, 3))(now.key)
            parent = exploit(pbt, mean, ready, keys[:, 0])
            copied = {name: x[parent] for name, x in values.items()}
            explored = explore(pbt, copied, keys[:, 1])
            values = {name: jnp.where(parent == numbers, x, explored[name]) for name, x in values.items()}
            score_sum, num_scores = (jnp.where(ready, 0, x) for x in (now.score_sum, now.num_scores))
            return Standing(score_sum, num_scores, jnp.zeros_like(now.since), parent, keys[:, 2]), values

        now, values = jax.lax.cond(due, select, lambda now, values: (now, dict(values)), now, dict(values))
        return now, values, due, report

    def copied(x: Any, parent: jax.Array, due: jax.Array) -> Any:
        with jax.named_scope("exploit"):
            return jax.lax.cond(due, lambda x: jax.tree.map(lambda leaf: leaf[parent], x), lambda x: x, x)

    copy_statistics = fragment(role="env", name="copy_statistics")(copied)

    def iteration(state: Any) -> tuple[Any, Metrics]:
        before: Standing = getattr(state, STANDING)
        after, metrics = agent.iteration(state)
        now, values, due, report = decide(before, _score(agent, metrics), getattr(state, FIELD))
        names = [name for name in learned(agent, state) if name not in (FIELD, STANDING)]
        fields = {name: copied(getattr(after, name), now.parent, due) for name in names}
        if state.env_state != () and jax.tree.leaves(statistics := agent.env.statistics(after.env_state)):
            fields["env_state"] = agent.env.with_statistics(after.env_state, copy_statistics(statistics, now.parent, due))
        return after._replace(**fields, **{FIELD: values, STANDING: now}), {**metrics, **report}

    return dataclasses.replace(agent, init=init, iteration=iteration, axes=axes)


def _score(agent: Agent, metrics: Metrics) -> Mean:
    """The score of every member in an iteration, as sums and counts `[M]`; more is better."""
    if agent.unit != "updates":
        score = metrics["episode_return"]
        assert isinstance(score, Mean)
        return score
    if "validation_loss" not in metrics:
        raise ValueError("pbt: no data are held out to compare the members; train with a validation_fraction above 0")
    loss: Any = metrics["validation_loss"]
    return Mean(-loss.total, loss.count) if isinstance(loss, Mean) else Mean(-loss, jnp.ones_like(loss))
