"""Population based training on devices: exploit and explore as pure functions, and the population that applies them.

In the shape descriptions, `M` denotes the number of members.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.agent import Agent, Metrics, Progress, innermost, with_innermost
from msrl_jax.algorithms.transformations import Counted
from msrl_jax.envs import distributions
from msrl_jax.experiment.agents import Member, learned, with_learned
from msrl_jax.experiment.pbt import NUMBER, PBT
from msrl_jax.fragments import fragment
from msrl_jax.fragments.metrics import Mean

PARENT = "pbt/parent"
"""The metric that tells whom each member copied at the last exploit; its own number if nobody."""

FACTORS = 0.8, 1.2
"""What perturbation multiplies a number by."""

_SALT = 0x9B7


class Standing(NamedTuple):
    """How the members stand.

    Attributes:
      score_sum: sum of the scores since a member was last compared. shape=(M,), dtype=float32
      num_scores: number of these scores. shape=(M,), dtype=float32
      since: iterations since the last exploit, shape=(), dtype=int32
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


class Evolving(NamedTuple):
    """The state of a population that is trained.

    Attributes:
      inner: the state of the members.
      standing: how they stand.
    """

    inner: Member
    standing: Standing


def acting_part(state: Any) -> Any:
    """The part of a run's state that acting takes: that of the agent of one member, with all that this agent has."""
    while isinstance(state, Counted | Evolving):
        state = state.inner
    return state


def evolve(agent: Agent, pbt: PBT) -> Agent:
    """A population that is trained (Jaderberg et al., 2017, arXiv 1711.09846, algorithm 1).

    The decision is a fragment of the server. What members copy stays where it is made: each field of the state that learners
    compute is a `cond` outside of fragments, because a policy may keep some fields on the server and others with the learner;
    statistics of the environments are copied by a fragment of theirs. So iterations without an exploit move the scores and the
    decision only.

    Args:
      agent: `members` with numbers.
      pbt: the specification.

    Returns:
      The agent. Its metrics tell the lineage, `pbt/parent`, and the values in effect, `pbt/FIELD`. `[M]`

    Raises:
      ValueError: if returns do not tell which member is better.
    """
    if not agent.ranked:
        raise ValueError(
            "pbt: the return is the sum over teams or players that oppose each other, and does not tell which member is "
            "better; train without pbt"
        )
    numbers = jnp.arange(pbt.members, dtype=jnp.int32)
    # Every device knows when it is time; everything else stays with its member until then.
    axes = Evolving(agent.axes, Standing(*[P("member")] * 5)._replace(since=P()))  # type: ignore[arg-type]

    def init(keys: jax.Array) -> Evolving:
        zeros = jnp.zeros(pbt.members)
        own = jax.vmap(lambda key: jax.random.fold_in(key, _SALT))(keys)
        return Evolving(agent.init(keys), Standing(zeros, jnp.copy(zeros), jnp.int32(0), numbers, own))

    @fragment(role="server")
    def decide(standing: Standing, score: Mean, values: Mapping[str, jax.Array]):
        report = {PARENT: standing.parent.astype(jnp.float32)} | {f"pbt/{name}": value for name, value in values.items()}
        now = standing._replace(
            score_sum=standing.score_sum + score.total, num_scores=standing.num_scores + score.count, since=standing.since + 1
        )
        due = now.since >= pbt.every

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

    def iteration(state: Evolving, progress: Progress) -> tuple[Evolving, Metrics]:
        after, metrics = agent.iteration(state.inner, progress)
        now, values, due, report = decide(state.standing, _score(agent, metrics), state.inner.numbers)
        own = innermost(after)
        after = with_learned(after, {at: copied(x, now.parent, due) for at, x in learned(agent, after).items()})
        if own.env_state != () and jax.tree.leaves(statistics := agent.env.statistics(own.env_state)):
            env_state = agent.env.with_statistics(own.env_state, copy_statistics(statistics, now.parent, due))
            after = with_innermost(after, innermost(after)._replace(env_state=env_state))
        return Evolving(after._replace(numbers=values), now), {**metrics, **report}

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
