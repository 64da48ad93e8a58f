"""Transferred Q-learning (Chen, Li and Jordan, 2022, arXiv 2202.04709): a new task, learned with the data of similar ones.

    python examples/transferred_q.py --policy SingleLearnerCoarse --cpu-devices 8 --svg docs/example_transferred_q.svg

A task is an MDP of a few stages whose optimal Q-functions are linear in many features, of which few matter. Of the target
there are few episodes, and there are episodes of similar source tasks. Backward over the stages, a Lasso over the episodes of
all tasks gives a pooled estimate, and one over the target's own episodes corrects it where the tasks differ. The responses of
all tasks are their rewards plus the target's value of the next state: re-targeting, so the sources' values bring no bias.

Shapes: `K` tasks, `N` episodes of each, `T` stages, `P` coordinates of a state, `D = 2 P + 2` features.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.cli import argument_types
from msrl_jax.report import curves

GRID = 2.0**30
"""Rewards and estimates are whole multiples of 1 / GRID, and features are -1 or 1. So sums over episodes and tasks are of whole
numbers that a float64 holds: no addition rounds, and no order of adding, on one device or many, changes a bit."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The sizes of an experiment, and the weights of the two Lassos."""

    sources: int = 16
    source_episodes: int = 100
    target_episodes: int = 80
    episodes_per_iteration: int = 80  # of the target, before each estimate
    exploration: float = 10.0  # after n episodes, a share exploration / n of actions is random
    stages: int = 3
    coordinates: int = 60
    relevant: int = 5  # number of coordinates that matter for rewards, and for the effect of an action
    changed: int = 3  # number of coefficients in which all sources differ from the target, and in which each does
    change: float = 0.6  # by how much; coefficients that are not 0 are 0.5 in size
    pooled_weight: float = 0.6  # of the penalties, in units of sqrt(log D / episodes)
    correction_weight: float = 1.0


OFFLINE, ONLINE = Setting(), Setting(target_episodes=300, episodes_per_iteration=10)
NAMES = "target alone", "pooled, not corrected", "transferred"
SOURCES = (0, 1, 2, 4, 8, 16)


class Task(NamedTuple):
    """Coefficients of the mean reward, and of the mean of the next state's first coordinate; others are -1 or 1, at random."""

    reward: Any  # [T, D]
    step: Any  # [T, D]


class Episodes(NamedTuple):
    """Episodes of `K` tasks."""

    states: jax.Array  # -1 or 1, [K, N, T + 1, P]
    actions: jax.Array  # -1 or 1, [K, N, T]
    rewards: jax.Array  # [K, N, T]
    counts: jax.Array  # 1 if the episode counts, else 0, [K, N]


class State(NamedTuple):
    """The state of a run."""

    sources: Episodes
    target: Episodes  # K = 1
    task: Task  # the target
    optimal: jax.Array  # its optimal Q-functions, [T, D]
    estimate: jax.Array  # of these, [T, D]
    weights: jax.Array  # of the penalties, [2]
    key: jax.Array


AXES = State(P("env"), *[P()] * 6)  # sources are divided over the devices that have the environments


def on_grid(x: jax.Array) -> jax.Array:
    """The nearest multiples of 1 / GRID."""
    return jnp.round(x * GRID) / GRID


def features(states: jax.Array, actions: jax.Array) -> jax.Array:
    """1 and the state `[..., P]`, and both times the action `[...]`. `[..., D]`"""
    of_state = jnp.concatenate([jnp.ones_like(states[..., :1]), states], -1)
    return jnp.concatenate([of_state, actions[..., None] * of_state], -1)


def action_values(states: jax.Array, coefficients: jax.Array) -> jax.Array:
    """The Q-values of the actions -1 and 1 in states `[..., P]`, by the coefficients of one stage `[D]`. `[2, ...]`"""
    return jnp.stack([features(states, jnp.full(states.shape[:-1], a)) @ coefficients for a in (-1.0, 1.0)])


def lasso(gram: jax.Array, moment: jax.Array, penalty: jax.Array, tolerance: float = 1e-12, steps: int = 20_000) -> jax.Array:
    """Minimizes `b.gram.b / 2 - moment.b + penalty * |b|_1` by FISTA (Beck and Teboulle, 2009); returns `b`, `[D]` float64.

    The momentum is reset where it points uphill (O'Donoghue and Candes, 2015, arXiv 1204.3982). `gram` `[D, D]` has the mean
    products of features, `moment` `[D]` those with responses. Steps end when no coefficient moves by more than `tolerance`.
    """
    rate = 1 / jnp.abs(gram).sum(-1).max()  # a bound of the largest eigenvalue

    def step(carry):
        b, ahead, momentum, _, count = carry
        z = ahead - rate * (gram @ ahead - moment)
        new = jnp.sign(z) * jnp.maximum(jnp.abs(z) - rate * penalty, 0)
        momentum = jnp.where((ahead - new) @ (new - b) > 0, 1.0, momentum)
        following = (1 + jnp.sqrt(1 + 4 * momentum**2)) / 2
        return new, new + (momentum - 1) / following * (new - b), following, jnp.abs(new - ahead).max(), count + 1

    zeros = jnp.zeros_like(moment)
    start = zeros, zeros, jnp.ones(()), jnp.asarray(jnp.inf), 0
    return jax.lax.while_loop(lambda carry: (carry[3] > tolerance) & (carry[4] < steps), step, start)[0]


@msrl.fragment(role="env")
def statistics(data: Episodes, stage: jax.Array, following: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums over the episodes of each task: products of features `[K, D, D]`, products with responses `[K, D]`, counts `[K]`."""
    x = features(data.states[:, :, stage], data.actions[:, :, stage]) * data.counts[..., None]
    responses = data.rewards[:, :, stage] + action_values(data.states[:, :, stage + 1], following).max(0)
    return jnp.einsum("kni,knj->kij", x, x), jnp.einsum("kni,kn->ki", x, responses), data.counts.sum(1)


def penalized(gram: jax.Array, moment: jax.Array, count: jax.Array, weight: jax.Array) -> jax.Array:
    """The Lasso of sums, with the penalty `weight * sqrt(log D / count)`. `[D]`"""
    return on_grid(lasso(gram / count, moment / count, weight * jnp.sqrt(jnp.log(len(moment)) / count)))


@msrl.fragment(role="learner")
def pooled_estimate(of_sources, of_target, weight: jax.Array) -> jax.Array:
    """The Lasso over the episodes of all tasks. `[D]`"""
    gram, moment, count = (a.sum(0) + b[0] for a, b in zip(of_sources, of_target, strict=True))
    return penalized(gram, moment, count, weight)


@msrl.fragment(role="server")
def correct(pooled: jax.Array, of_target, num_episodes: jax.Array, weight: jax.Array) -> jax.Array:
    """Adds the Lasso of what the pooled estimate leaves of the target's responses; without sources there is none. `[D]`"""
    gram, moment, count = (x[0] for x in of_target)
    correction = penalized(gram, moment - gram @ pooled, count, weight)
    return pooled + jnp.where(num_episodes.sum() > 0, correction, 0)


def estimate_backward(sources: Episodes, target: Episodes, weights: jax.Array) -> jax.Array:
    """The transferred estimate of the target's optimal Q-functions, the last stage first. `[T, D]`"""

    def one_stage(following, stage):
        of_sources, of_target = (statistics(data, stage, following) for data in (sources, target))
        pooled = pooled_estimate(of_sources, of_target, weights[0])
        found = correct(pooled, of_target, of_sources[-1], weights[1])
        return found, found

    num_stages, num_features = target.actions.shape[-1], 2 * target.states.shape[-1] + 2
    return jax.lax.scan(one_stage, jnp.zeros(num_features), jnp.arange(num_stages), reverse=True)[1]


def play(key: jax.Array, task: Task, policy: jax.Array, exploration: jax.Array | float, num: int) -> Episodes:
    """Plays `num` episodes of one task, greedily for the Q-functions `policy` `[T, D]` but for random actions."""
    size = policy.shape[-1] // 2 - 1

    def stage(state, inputs):
        key, reward, step, q = inputs
        explores, chosen, noise, moved, rest = jax.random.split(key, 5)
        low, high = action_values(state, q)
        random, greedy = jax.random.rademacher(chosen, (num,), float), jnp.where(high >= low, 1.0, -1.0)
        action = jnp.where(jax.random.uniform(explores, (num,)) < exploration, random, greedy)
        x = features(state, action)
        first = jnp.where(2 * jax.random.uniform(moved, (num,)) - 1 < x @ step, 1.0, -1.0)
        after = jax.random.rademacher(rest, (num, size), float).at[:, 0].set(first)
        return after, (after, action, on_grid(x @ reward + jax.random.normal(noise, (num,))))

    first, *keys = jax.random.split(key, len(policy) + 1)
    start = jax.random.rademacher(first, (num, size), float)
    _, (states, *rest) = jax.lax.scan(stage, start, (jnp.stack(keys), *task, policy))
    found = jnp.concatenate([start[None], states]), *rest
    states, actions, rewards = (x.swapaxes(0, 1)[None] for x in found)
    return Episodes(states, actions, rewards, jnp.ones((1, num)))


@functools.partial(jax.jit, static_argnames="num")
def play_sources(key: jax.Array, rewards: jax.Array, step: jax.Array, num: int) -> Episodes:
    """Plays `num` episodes of each source with random actions."""
    play_one = jax.vmap(lambda key, reward: play(key, Task(reward, step), 0 * step, 1.0, num))
    return jax.tree.map(lambda x: x[:, 0], play_one(jax.random.split(key, len(rewards)), rewards))


def make_iteration(setting: Setting) -> Callable[[State], tuple[State, dict[str, jax.Array]]]:
    """The loop: plays episodes of the target, and estimates its Q-functions from them and those of the sources."""

    @msrl.fragment(role="env")
    def play_target(key, target, task, optimal, policy):
        played = target.counts.sum().astype(int)
        exploration = setting.exploration / jnp.maximum(played, setting.exploration)
        new = play(key, task, policy, exploration, setting.episodes_per_iteration)
        lost = lambda states, actions, q: action_values(states, q).max(0) - features(states, actions) @ q
        regret = jax.vmap(lost, (1, 1, 0))(new.states[0, :, :-1], new.actions[0], optimal).sum(0).mean()
        target = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, played, 1), target, new)
        return target, on_grid(regret)

    def iteration(state: State) -> tuple[State, dict[str, jax.Array]]:
        key, now = jax.random.split(state.key)
        target, regret = play_target(now, state.target, state.task, state.optimal, state.estimate)
        estimate = estimate_backward(state.sources, target, state.weights)
        error = on_grid(jnp.sqrt(jnp.sum((estimate - state.optimal) ** 2, -1).mean()))
        return state._replace(target=target, estimate=estimate, key=key), {"regret": regret, "error": error}

    return iteration


def draw_tasks(seed: int, setting: Setting) -> tuple[Task, np.ndarray]:
    """A target, and the coefficients of the sources' mean rewards `[K, T, D]`, which differ from its own in few places."""
    rng, size = np.random.default_rng(seed), 2 * setting.coordinates + 2
    reward, step = np.zeros((2, setting.stages, size))
    for stage in range(setting.stages):
        for half in (1, setting.coordinates + 2):  # where states begin, and states times actions
            others = rng.choice(np.arange(1, setting.coordinates), setting.relevant - 1, replace=False)
            reward[stage, half + np.array([0, *others])] = rng.choice([-0.5, 0.5], setting.relevant)
            step[stage, half + rng.choice(setting.coordinates)] = rng.choice([-0.45, 0.45])
    sources = np.repeat(reward[None], setting.sources, 0)
    for task, stage in itertools.product([slice(None), *range(setting.sources)], range(setting.stages)):
        where = rng.choice(size, setting.changed, replace=False)
        sources[task, stage, where] += rng.choice([-setting.change, setting.change], setting.changed)
    return Task(reward, step), sources


def optimal_q(task: Task) -> np.ndarray:
    """The coefficients of the optimal Q-functions, by enumerating what decides the best action. `[T, D]`"""
    found, mean, half = [], np.zeros(2), task.reward.shape[-1] // 2  # mean value of the next state if it begins with -1, 1
    for reward, step in zip(task.reward[::-1], task.step[::-1], strict=True):
        q = reward + (mean[1] - mean[0]) / 2 * step
        q[0] += mean.mean()
        found.append(q)
        base, acting = q[:half], q[half:]
        used = acting[2:][acting[2:] != 0]
        others = np.array(list(itertools.product([-1, 1], repeat=len(used)))) @ used
        mean = np.array([base[0] + s * base[1] + np.abs(acting[0] + s * acting[1] + others).mean() for s in (-1, 1)])
    return np.array(found[::-1])


def initial_state(seed: int, setting: Setting, num_sources: int) -> State:
    """A state before the first iteration, in which the first `num_sources` sources count."""
    (task, rewards), (source_key, key) = draw_tasks(seed, setting), jax.random.split(jax.random.key(seed))
    sources = play_sources(source_key, rewards, task.step, setting.source_episodes)
    sources = sources._replace(counts=sources.counts * (jnp.arange(setting.sources) < num_sources)[:, None])
    target = jax.tree.map(lambda x: jnp.zeros((1, setting.target_episodes, *x.shape[2:])), sources)
    weights, none = np.array([setting.pooled_weight, setting.correction_weight]), np.zeros_like(task.reward)
    return jax.tree.map(jnp.asarray, State(sources, target, task, on_grid(optimal_q(task)), none, weights, key))


def run(setting: Setting, seeds: Sequence[int], sources: Sequence[int], policy: Any = "GPUOnly"):
    """The regret of an episode and the error of the estimate for each number of sources. `[seeds, sources, iterations]`"""
    iteration, num = make_iteration(setting), setting.target_episodes // setting.episodes_per_iteration
    with jax.enable_x64(True):
        program = msrl.compile(iteration, initial_state(0, setting, 0), policy=msrl.policies.get(policy), axes=AXES)
        found = [[program.run(initial_state(s, setting, k), num)[1] for k in sources] for s in seeds]
    return {name: np.array([[row[name] for row in rows] for rows in found]) for name in ("regret", "error")}


def figure(errors: np.ndarray, regret: np.ndarray) -> str:
    """Draws errors `[seeds, 3, sources]` and regrets so far `[seeds, 2, iterations]`, with 95% intervals of the mean."""
    with curves.styled():
        drawn, (upper, lower) = curves.figure_of(2)
        episodes = ONLINE.episodes_per_iteration * np.arange(1, regret.shape[-1] + 1)
        lines = [(upper, number, range(len(SOURCES)), errors[:, number]) for number in range(3)]
        for panel, number, x, rows in [*lines, (lower, 0, episodes, regret[:, 0]), (lower, 2, episodes, regret[:, 1])]:
            curves.draw_curve(panel, NAMES[number], number, *curves.mean_curve(x, rows.T))
        upper.set(xlabel="source tasks", ylabel="error", ylim=0, xticks=range(len(SOURCES)), xticklabels=SOURCES)
        lower.set(xlabel="episodes of the target", ylabel="regret so far", ylim=0)
        return curves.svg_of(curves.finished(drawn))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="GPUOnly")
    parser.add_argument("--cpu-devices", type=argument_types.cpu_devices)
    parser.add_argument("--seeds", type=argument_types.positive_int, default=5)
    parser.add_argument("--svg", type=argument_types.new_file)
    args = parser.parse_args(arguments)
    seeds, uncorrected = range(args.seeds), Setting(correction_weight=1e9)
    found, pooled = (run(setting, seeds, SOURCES, args.policy)["error"][..., -1] for setting in (OFFLINE, uncorrected))
    errors = np.stack([np.repeat(found[:, :1], len(SOURCES), 1), pooled, found], 1)
    regret = run(ONLINE, seeds, (0, ONLINE.sources), args.policy)["regret"].cumsum(-1) * ONLINE.episodes_per_iteration
    for k, *row in zip(SOURCES, *errors.mean(0), strict=True):
        print(f"errors with {k:2} sources:", ", ".join(f"{name} {x:.3f}" for name, x in zip(NAMES, row, strict=True)))
    print("regret, target alone and transferred:", *regret[..., -1].mean(0).round(1))
    if args.svg:
        args.svg.write_text(figure(errors, regret))


if __name__ == "__main__":
    main()
