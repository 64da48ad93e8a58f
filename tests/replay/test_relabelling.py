"""Goals in hindsight: each is one that was achieved in the same episode, at a step that the strategy allows, and as often as it
says; rewards and ends are those of the new goal. All is compared with what was inserted, with NumPy.

Tests of frequencies fail by chance with a probability of at most 1e-6 each, over seeds; the seeds are fixed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from msrl_jax import replay
from msrl_jax.envs.goals import Goals
from msrl_jax.replay import relabelling as module
from tests.support.keys import key_uses, reused_keys

E, T, L, TOTAL, B, KEYS, DISCOUNT = 8, 4, 40, 100, 256, 16, 0.9


def reward_of(achieved, desired):
    """Minus the distance of the first components, which terminates at 0; the second tells who gave the goal."""
    distance = jnp.abs(achieved - desired)[0]
    return -distance, distance < 0.5


GOALS = Goals(
    achieved=lambda obs: obs["achieved_goal"],
    desired=lambda obs: obs["desired_goal"],
    replace=lambda obs, goal: obs | {"desired_goal": goal},
    reward=reward_of,
)


def history(seed=0):
    """Steps `[TOTAL, E]` in which the goal that step `t` achieved is `(t, 0)`, and the desired one `(..., 1)`.

    The episode of the first environment never ends. Of the terminations, some are explained by their goal. Also returns the
    first and the last step of the episode of each step.
    """
    rng = np.random.default_rng(seed)
    ends = rng.random((TOTAL, E)) < 0.08
    ends[:, 0] = False
    terminated = ends & (rng.random(ends.shape) < 0.6)
    when = np.broadcast_to(np.arange(TOTAL, dtype=np.int32)[:, None], ends.shape)
    last = np.minimum.accumulate(np.where(ends, when, TOTAL - 1)[::-1])[::-1]
    begins = np.concatenate([np.ones((1, E), bool), ends[:-1]])
    first = np.maximum.accumulate(np.where(begins, when, 0))
    explained = rng.random(E) < 0.5
    desired = np.where(terminated[last, np.arange(E)] & explained, last, -1000 - first)

    def obs(achieved):
        goals = {"achieved_goal": (achieved, 0 * achieved), "desired_goal": (desired, 0 * desired + 1)}
        return {name: np.stack(x, -1).astype(np.float32) for name, x in goals.items()} | {"observation": achieved}

    reward = rng.normal(size=ends.shape).astype(np.float32)
    number = np.arange(TOTAL * E, dtype=np.int32).reshape(ends.shape)
    return replay.Transition(obs(when - 1), number, reward, terminated, ends & ~terminated, obs(when)), first, last


def make(kind, **options):
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), history()[0])
    return kind(example, capacity=L * E, num_envs=E, unroll_length=T, batch_size=B, **{"discount": DISCOUNT} | options)


def filled(buffer, items, state=None):
    """The state after all steps."""
    chunks = jax.tree.map(lambda x: x.reshape(TOTAL // T, T, *x.shape[1:]), items)
    insert = jax.jit(lambda state: jax.lax.scan(lambda s, x: (buffer.insert(s, x), None), state, chunks)[0])
    return insert(buffer.init() if state is None else state)


def batches(buffer, state, seed=1):
    """Many batches as one, of NumPy arrays."""
    drawn = jax.jit(jax.vmap(buffer.sample, (None, 0)))(state, jax.random.split(jax.random.key(seed), KEYS))
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), (drawn.experience, drawn.indices))


def transition(items, t, env, goal, length):
    """The n-step transition in float64, of a new goal if it is not None; also its last step."""
    total, weight, at = 0.0, 1.0, t
    for at in range(t, t + length):
        achieved, desired = (items.next_obs[key][at, env, 0] for key in ("achieved_goal", "desired_goal"))
        stops, pays = items.terminated[at, env], items.reward[at, env]
        if goal is not None:
            stops = achieved == goal or (stops and achieved != desired)
            pays = -abs(float(achieved) - goal)
        total += weight * pays
        weight *= 0.0 if stops else DISCOUNT
        if stops or items.terminated[at, env] or items.truncated[at, env]:
            break
    return total, weight, at


CASES = [
    ("future", 3, replay.prioritized),
    pytest.param("final", 1, replay.uniform, marks=pytest.mark.long),
    pytest.param("episode", 2, replay.uniform, marks=pytest.mark.long),
    pytest.param("geometric", 1, replay.uniform, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("by", "length", "kind"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_goals_rewards_and_ends_are_those_that_the_strategy_allows(by, length, kind):
    items, first, last = history()
    share = 0.8
    buffer = make(kind, length=length, relabelling=replay.Relabelling(GOALS, share, by))
    got, at = batches(buffer, filled(buffer, items))
    replaced = got.obs["desired_goal"][:, 1] == 0
    deviation = np.sqrt(share * (1 - share) * len(replaced))
    assert abs(replaced.sum() - share * len(replaced)) < 4.9 * deviation
    rng, uniform, kinds = np.random.default_rng(2), [], set()
    for b, (t, env) in enumerate(zip(*at, strict=True)):
        goal = got.obs["desired_goal"][b, 0] if replaced[b] else None
        total, weight, stop = transition(items, t, env, goal, length)
        np.testing.assert_allclose((got.reward[b], got.discount[b]), (total, weight), rtol=1e-5, atol=1e-5)
        assert got.action[b] == items.action[t, env]
        for key in ("observation", "achieved_goal", "desired_goal"):
            of_goal = replaced[b] and key == "desired_goal"
            np.testing.assert_array_equal(got.obs[key][b], (goal, 0) if of_goal else items.obs[key][t, env])
            np.testing.assert_array_equal(got.next_obs[key][b], (goal, 0) if of_goal else items.next_obs[key][stop, env])
        if not replaced[b]:
            continue
        low = max(first[t, env], TOTAL - L) if by == "episode" else last[t, env] if by == "final" else t
        count, rank = last[t, env] - low + 1, int(goal) - low
        assert 0 <= rank < count
        mass = DISCOUNT ** np.arange(count) if by == "geometric" else np.ones(count)
        mass = mass / mass.sum()
        uniform.append(mass[:rank].sum() + rng.random() * mass[rank])  # uniform in [0, 1] if the masses are right
        kinds.add((bool(items.terminated[t, env]), weight == 0, first[t, env] < TOTAL - L, env == 0))
    assert stats.chisquare(np.histogram(uniform, 20, (0, 1))[0]).pvalue > 1e-6
    assert len(kinds) > 6, "ends of all kinds, episodes that are partly overwritten, and one that never ends"


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
def test_distances_are_geometric_up_to_the_end(discount):
    count = 7
    fraction = (np.arange(100_000) + 0.5) / 100_000
    got = np.bincount(module.geometric(jnp.float32(fraction), jnp.full(len(fraction), count), discount), minlength=count)
    mass = discount ** np.arange(count)
    np.testing.assert_allclose(got / len(fraction), mass / mass.sum(), atol=2e-4)


@pytest.mark.long
def test_the_same_batches_after_two_to_the_31_episodes():
    """Numbers of episodes wrap around."""
    buffer = make(replay.uniform, length=2, relabelling=replay.Relabelling(GOALS, 1.0, "episode"))
    items, empty = history()[0], buffer.init()
    late = empty._replace(items=[*empty.items[:-1], jnp.full_like(empty.items[-1], 2**31 - 4)])
    states = [filled(buffer, items, state) for state in (empty, late)]
    assert states[1].items[-1].min() < 0 < states[1].items[-1].max()
    jax.tree.map(np.testing.assert_array_equal, *(batches(buffer, state) for state in states))


@pytest.mark.parametrize("by", ["episode", "geometric"])
def test_goals_are_drawn_with_keys_of_their_own(by):
    buffer = make(replay.uniform, relabelling=replay.Relabelling(GOALS, 0.5, by))
    uses = key_uses(lambda state, key: buffer.sample(state, key).experience, buffer.init(), jax.random.key(0))
    assert uses and reused_keys(uses) == []


def test_a_share_of_0_changes_no_batch_and_a_discount_may_be_traced():
    items = history()[0]
    plain, none = make(replay.uniform), make(replay.uniform, relabelling=replay.Relabelling(GOALS, 0.0))
    assert len(plain.init().items) == len(jax.tree.leaves(items)) == len(none.init().items) - 1
    jax.tree.map(np.testing.assert_array_equal, *(batches(x, filled(x, items)) for x in (plain, none)))
    how = replay.Relabelling(GOALS, 1.0, "geometric")
    state, key = filled(make(replay.uniform, relabelling=how), items), jax.random.key(3)
    sample = jax.jit(jax.vmap(lambda discount: make(replay.uniform, relabelling=how, discount=discount).sample(state, key)))
    together = sample(jnp.array([0.5, 0.95])).experience
    for i, discount in enumerate((0.5, 0.95)):
        alone = jax.jit(make(replay.uniform, relabelling=how, discount=discount).sample)(state, key).experience
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], together.obs), alone.obs)


def test_goals_of_several_arrays_and_of_packed_observations():
    items, *_ = history()
    pair = lambda goal: {"a": goal[..., [0, 0]], "b": goal[..., [1, 1]]}
    two = lambda obs: obs | {key: pair(obs[key]) for key in ("achieved_goal", "desired_goal")}
    goals = GOALS._replace(
        reward=lambda achieved, desired: reward_of(*(jnp.concatenate([x["a"], x["b"]])[1:3] for x in (achieved, desired)))
    )
    split = items._replace(obs=two(items.obs), next_obs=two(items.next_obs))
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), split)
    sizes = {"capacity": L * E, "num_envs": E, "unroll_length": T, "batch_size": B, "discount": DISCOUNT}
    one = make(replay.uniform, relabelling=replay.Relabelling(GOALS))
    other = replay.uniform(example, **sizes, relabelling=replay.Relabelling(goals), storage={"achieved_goal": "bfloat16"})
    (a, _), (b, _) = (batches(buffer, filled(buffer, x)) for buffer, x in ((one, items), (other, split)))
    np.testing.assert_array_equal(a.reward, b.reward)
    for name in ("obs", "next_obs"):
        jax.tree.map(np.testing.assert_array_equal, two(getattr(a, name)), getattr(b, name))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"goals of n-step transitions; pass a msrl_jax.replay.Transition and its discount="):
        make(replay.prioritized, relabelling=replay.Relabelling(GOALS), discount=None)
    with pytest.raises(ValueError, match=r"share=1.5; use a number in \[0, 1\]"):
        replay.Relabelling(GOALS, 1.5)
    with pytest.raises(ValueError, match="by='past'; use one of future, final, episode, geometric"):
        replay.Relabelling(GOALS, 0.5, "past")
