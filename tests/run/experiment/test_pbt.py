"""Population based training: its two steps by hand, the paper's toy problem, and populations that are the same everywhere."""

import dataclasses
import functools
import json
import re
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.agents.agent import Agent, innermost
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.plan.hlo import COLLECTIVES, module_of
from msrl_jax.policies import Layout, Placement
from msrl_jax.run.experiment.members import Member
from msrl_jax.run.experiment.pbt import evolve, exploit, explore, read_pbt
from msrl_jax.run.prepare import make_experiment
from tests.support.compiled import instructions
from tests.support.slow import slow_unless

RATE = envs.log_uniform(1e-5, 1e-2)
SEARCH = {"learning_rate": RATE, "entropy_coef": envs.uniform(0, 0.1)}
ENV, STEPS = "CartPole-v1:max_steps_in_episode=30", 64
SMALL = {
    "num_envs": 8,
    "unroll_length": 8,
    "num_epochs": 1,
    "num_minibatches": 2,
    "hidden_sizes": (8,),
    "normalize_observations": True,
}
EIGHT = msrl.PBT(search=SEARCH, members=8, every=2, fraction=0.25)


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


compiled_exploit = jax.jit(exploit, static_argnums=0)


def parents(pbt, score, ready=None, seed=0):
    ready = np.ones(len(score), bool) if ready is None else np.array(ready)
    return np.asarray(compiled_exploit(pbt, jnp.float32(score), ready, keys(len(score), seed)))


# ---- exploit and explore


@pytest.mark.parametrize(("fraction", "replaced"), [(0.25, 2), (0.01, 1)])
def test_truncation_replaces_the_worst_by_the_best(fraction, replaced):
    pbt = msrl.PBT(search=SEARCH, members=10, fraction=fraction)
    score = np.random.default_rng(0).permutation(10)
    best, worst = np.argsort(score)[-replaced:], np.argsort(score)[:replaced]
    seen = set()
    for seed in range(20):
        found = parents(pbt, score, seed=seed)
        assert set(found[worst]) <= set(best)
        kept = np.setdiff1d(np.arange(10), worst)
        np.testing.assert_array_equal(found[kept], kept)
        seen |= set(found[worst])
    assert seen == set(best), "each of the best is copied by and by"


def test_truncation_chooses_evenly_among_the_best():
    pbt = msrl.PBT(search=SEARCH, members=8, fraction=0.5)
    found = jax.vmap(lambda k: exploit(pbt, jnp.arange(8.0), jnp.ones(8, bool), jax.random.split(k, 8)))(keys(2000))
    counts = np.bincount(np.asarray(found)[:, 0], minlength=8)
    assert (counts[:4] == 0).all() and (abs(counts[4:] - 500) < 80).all()


def test_a_tournament_copies_whoever_is_better():
    pbt = msrl.PBT(search=SEARCH, members=5, exploit="tournament")
    score, opponents = np.array([3.0, 1.0, 4.0, 0.0, 2.0]), [set() for _ in range(5)]
    for seed in range(100):
        found = parents(pbt, score, seed=seed)
        assert all(score[p] > score[i] or p == i for i, p in enumerate(found))
        for i, p in enumerate(found):
            opponents[i].add(int(p))
    assert opponents == [{0, 2}, {0, 1, 2, 4}, {2}, {0, 1, 2, 4}, {0, 2, 4}]


@pytest.mark.parametrize("exploit_by", ["truncation", "tournament"])
def test_nobody_waits_for_members_that_are_not_ready(exploit_by):
    pbt = msrl.PBT(search=SEARCH, members=5, exploit=exploit_by, fraction=0.5)
    score, ready = np.array([9.0, 1.0, np.nan, 3.0, -5.0]), [False, True, False, True, False]
    found = np.array([parents(pbt, score, ready, seed) for seed in range(20)])
    np.testing.assert_array_equal(found, [[0, 3, 2, 3, 4]] * 20, err_msg="1 and 3 are ready, so 1 copies 3")
    np.testing.assert_array_equal(parents(pbt, score, [False, True, False, False, False]), np.arange(5))
    np.testing.assert_array_equal(parents(pbt, score, [False] * 5), np.arange(5))


@pytest.mark.parametrize("exploit_by", ["truncation", "tournament"])
def test_nobody_copies_an_equal(exploit_by):
    pbt = msrl.PBT(search=SEARCH, members=6, exploit=exploit_by, fraction=0.5)
    np.testing.assert_array_equal(parents(pbt, [-500.0] * 6), np.arange(6))


def test_perturbation_multiplies_and_stays_in_the_range():
    pbt = msrl.PBT(search=SEARCH | {"discount": envs.choice([0.99, 0.9, 0.95])}, members=600)
    values = {"learning_rate": [1e-3], "entropy_coef": [0.09], "discount": [0.95]}
    new = explore(pbt, {name: jnp.float32(x * 600) for name, x in values.items()}, keys(600))
    for name, expected in (("learning_rate", [8e-4, 1.2e-3]), ("entropy_coef", [0.072, 0.1]), ("discount", [0.9, 0.99])):
        found, counts = np.unique(new[name], return_counts=True)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert (abs(counts - 300) < 60).all()
    apart = (new["learning_rate"] > 1e-3) == (new["entropy_coef"] > 0.09)
    assert 240 < int(apart.sum()) < 360, "fields change independently"


class Idle(NamedTuple):
    """A member that learns nothing."""

    params: jax.Array
    env_state: tuple[()] = ()


def test_chance_that_ranks_equals_is_not_that_of_the_perturbation():
    """Seven members are equal, and one of them copies the eighth, which is better."""
    fields = {"discount": jnp.full(8, 0.5), "learning_rate": jnp.full(8, 1e-3)}
    pbt = msrl.PBT({"discount": envs.uniform(0, 1), "learning_rate": RATE}, members=8, every=1, fraction=0.125)
    agent = Agent(
        init=lambda keys: Member(Idle(jnp.zeros(8)), fields),
        act=lambda *_: None,
        axes=Member(Idle(P("member")), P("member")),
        iteration=lambda state, progress: (state, {"episode_return": Mean(jnp.arange(8.0) // 7, jnp.ones(8))}),
        steps_per_iteration=1,
        updates_per_iteration=1,
        env=None,
    )
    population = evolve(agent, pbt)

    @jax.jit
    @jax.vmap
    def evolved(key):
        state, _ = population.iteration(population.init(jax.random.split(key, 8)), None)
        return state.standing.parent != jnp.arange(8), state.inner.numbers

    copies, values = evolved(keys(400))
    assert (copies.sum(1) == 1).all() and (abs(copies.sum(0)[:7] - 400 / 7) < 30).all()
    for name, before in fields.items():
        up = values[name][copies] > before[0]
        assert 160 < up.sum() < 240, name


def test_a_member_with_a_nan_is_compared_again_in_the_next_period():
    fields = {"discount": jnp.full(2, 0.5)}
    agent = Agent(
        init=lambda keys: Member(Idle(jnp.zeros(2)), fields),
        act=lambda *_: None,
        axes=Member(Idle(P("member")), P("member")),
        iteration=lambda state, score: (state, {"episode_return": Mean(score, jnp.ones(2))}),
        steps_per_iteration=1,
        updates_per_iteration=1,
        env=None,
    )
    population = evolve(agent, msrl.PBT({"discount": envs.uniform(0, 1)}, members=2, every=1, fraction=0.5))
    state, parents = population.init(keys(2)), []
    for score in ([np.nan, 1.0], [0.0, 1.0]):
        state, _ = population.iteration(state, jnp.float32(score))
        parents.append(state.standing.parent.tolist())
    assert parents == [[0, 1], [1, 1]]


def test_resampling_draws_anew_or_keeps():
    pbt = msrl.PBT(search=SEARCH, members=2000, explore="resample", resample_probability=0.25)
    new = explore(pbt, {"learning_rate": jnp.full(2000, 2e-3), "entropy_coef": jnp.full(2000, 0.5)}, keys(2000))
    drawn = np.asarray(new["learning_rate"])[np.asarray(new["learning_rate"]) != np.float32(2e-3)]
    assert abs(len(drawn) - 500) < 80 and drawn.min() >= np.float32(1e-5) and drawn.max() <= np.float32(1e-2)
    assert abs(np.median(np.log10(drawn)) + 3.5) < 0.2, "log-uniform"


def test_initial_values_are_one_from_each_part_of_the_distribution():
    pbt = msrl.PBT(search=SEARCH | {"discount": "choice:0.9:0.99"}, members=16)
    values = pbt.initial(3)
    parts = np.log10(values["learning_rate"]) * 16 / 3 + 5 * 16 / 3
    np.testing.assert_array_equal(np.sort(parts.astype(int)), np.arange(16))
    np.testing.assert_array_equal(np.sort((np.array(values["entropy_coef"]) * 160).astype(int)), np.arange(16))
    assert sorted(values["discount"]) == [np.float32(0.9)] * 8 + [np.float32(0.99)] * 8
    assert values == pbt.initial(3) and values != pbt.initial(4)


# ---- the toy problem of the paper, section 3.4 and figure 2


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def toy(pbt, exploits, explores, key):
    """Two members ascend `1.2 - h0 theta0^2 - h1 theta1^2`; the best `1.2 - theta0^2 - theta1^2` after 400 steps.

    A little noise in the scores breaks the tie at the start, where both members are equally good.
    """
    true = lambda theta: 1.2 - jnp.square(theta).sum(-1)
    start = jnp.full((2, 2), 0.9), {"h0": jnp.array([1.0, 0.0]), "h1": jnp.array([0.0, 1.0])}

    def period(carry, key):
        theta, h = carry
        rates = jnp.stack([h["h0"], h["h1"]], axis=-1)
        theta, _ = jax.lax.scan(lambda x, _: (x - 0.02 * rates * x, None), theta, length=4)
        noise, *members = jax.random.split(key, 5)
        members = jnp.stack(members).reshape(2, 2)
        score = true(theta) + 1e-4 * jax.random.normal(noise, (2,))
        parent = exploit(pbt, score, jnp.ones(2, bool), members[0]) if exploits else jnp.arange(2)
        changes = parent != jnp.arange(2) if exploits else jnp.ones(2, bool)
        theta, copied = theta[parent], {name: x[parent] for name, x in h.items()}
        new = explore(pbt, copied, members[1]) if explores else copied
        return (theta, {name: jnp.where(changes, new[name], copied[name]) for name in h}), None

    (theta, _), _ = jax.lax.scan(period, start, jax.random.split(key, 100))
    return true(theta).max()


@pytest.mark.parametrize("how", ["perturb", pytest.param("resample", marks=pytest.mark.slow)])
def test_only_exploit_and_explore_together_solve_the_toy_problem_of_the_paper(how):
    pbt = msrl.PBT(
        search={"h0": envs.uniform(0.1, 1), "h1": envs.uniform(0.1, 1)},
        members=2,
        fraction=0.5,
        explore=how,
        resample_probability=0.5,
    )
    scores = [float(toy(pbt, True, True, jax.random.key(seed))) for seed in range(5)]
    assert min(scores) >= 1.19
    assert float(toy(pbt, False, False, jax.random.key(0))) < 0.4, "grid search"
    assert float(toy(pbt, True, False, jax.random.key(0))) < 0.4, "exploit only"


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"search": {}}, "PBT.search={}: name at least one field"),
        ({"members": 1}, "PBT.members=1: use an integer of at least 2"),
        ({"exploit": "truncate"}, "PBT.exploit='truncate' (did you mean 'truncation'?); use one of truncation, tournament"),
        ({"fraction": 0.6}, "PBT.fraction=0.6: use a number above 0 and at most 0.5"),
        ({"resample_probability": 0}, "PBT.resample_probability=0: use a number above 0 and at most 1"),
        ({"search": {"learning_rate": 1e-3}}, "PBT.search['learning_rate']=0.001 is not a distribution; use msrl.envs.uniform"),
        ({"search": {"learning_rate": envs.log_uniform(0, 1)}}, "use low <= high above 0"),
        ({"search": {"learning_rate": envs.uniform(1e-3, 1e-3)}}, "has only one value; pass it to train as learning_rate"),
        ({"search": {"learning_rate": envs.uniform(1e-4, envs.ramp(1e-3, 1, 10))}}, "a range cannot follow a ramp"),
    ],
)
def test_specifications_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        msrl.PBT(**{"search": SEARCH, **fields})


def searching(**fields):
    return {"pbt": {"search": fields}}


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (ENV, searching(num_envs=RATE), "num_envs of PPO changes the shapes or control flow of the program; it can search"),
        (ENV, searching(discount="uniform:0.9:1.5"), "PBT.search: discount=1.5 of discount=uniform(0.9, 1.5): PPO.discount"),
        (ENV, {"pbt": {"serch": SEARCH}}, "pbt has no field 'serch' (did you mean 'search'?); its fields are search, members"),
        (ENV, {"pbt": EIGHT, "seeds": 2}, "seeds=2: the members of a population have the seeds from seed on; give pbt members"),
        (ENV, {"pbt": EIGHT, "chunk": 3}, "chunk=3 does not divide PBT.every=2"),
        (ENV, {"pbt": EIGHT, "learning_rate": 1e-3}, "learning_rate=0.001: PBT.search sets this field; leave it out"),
        (ENV, {"pbt": EIGHT, "discount": [0.9] * 8}, "this field has several values, but is not in PBT.search; add it there"),
        ("gymnasium:CartPole-v1", {"pbt": EIGHT}, "pbt with members=8: members share a program, but"),
        (ENV, {"pbt": 7}, "pbt=7: give msrl.PBT(search=..., members=..., every=...)"),
    ],
)
def test_runs_that_are_refused_before_anything_compiles(env, options, message):
    if env.startswith("gymnasium:"):
        pytest.importorskip("gymnasium")
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        msrl.train("ppo", env, total_steps=STEPS, progress=False, **options)


def test_the_search_is_over_numbers_of_the_chosen_options():
    asked = {"exploration": "per_env", "pbt": searching(**{"exploration.base": "uniform:0.1:0.2"})["pbt"] | {"members": 2}}
    values = make_experiment("dqn", **asked).settings["exploration.base"]
    assert len(values) == 2 and all(0.1 <= x <= 0.2 for x in values)
    with pytest.raises(ValueError, match="belongs to an option that this DQN does not use"):
        make_experiment("dqn", **asked | {"exploration": "annealed"})


def test_text_says_the_same():
    text = "members=8,every=2,fraction=0.25,learning_rate=log_uniform:1e-5:1e-2,exploit=tournament,entropy_coef=uniform:0:0.1"
    assert read_pbt(text) == dataclasses.replace(EIGHT, exploit="tournament")
    assert read_pbt(EIGHT.to_json()) == EIGHT
    assert read_pbt(json.loads(json.dumps(EIGHT.to_json()))) == EIGHT
    with pytest.raises(ValueError, match="cannot read"):
        read_pbt("members=8;every=2")


# ---- the same run everywhere


@functools.cache
def reference(iterations=6):
    """The run of eight members, the initial state, and the result of plain jit(scan)."""
    setup = make_experiment("ppo", ENV, **SMALL, pbt=EIGHT)
    state = setup.initial_state()
    return setup, state, *jax.jit(lambda s: jax.lax.scan(lambda s, _: setup.agent.iteration(s), s, length=iterations))(state)


MATRIX = [
    slow_unless((n, policy) == (2, "SingleLearnerCoarse"), n, policy)
    for n in (1, 2, 4, 8)
    for policy in sorted(msrl.policies.POLICIES)
]


@pytest.mark.long
@pytest.mark.parametrize(("count", "policy"), MATRIX)
def test_the_same_population_under_every_policy(count, policy):
    setup, state, after, metrics = reference()
    program = msrl.compile(
        setup.agent.iteration, state, policy=msrl.policies.get(policy), axes=setup.agent.axes, devices=jax.devices()[:count]
    )
    mine, measured = program.run(state, 6, chunk=6)
    np.testing.assert_array_equal(measured["pbt/parent"], metrics["pbt/parent"])
    assert (measured["pbt/parent"][-1] != np.arange(8)).any(), "somebody was replaced"
    for name in SEARCH:
        np.testing.assert_allclose(measured[f"pbt/{name}"], metrics[f"pbt/{name}"], rtol=1e-6)
    statistics = setup.agent.env.statistics
    both = ((s.params, s.opt_state, statistics(s.env_state)) for s in map(innermost, (mine, after)))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_members_copy_what_learners_compute_and_nothing_else():
    """One iteration with an exploit, against the same iteration of independent members and a copy in NumPy."""
    setup, state, *_ = reference()
    one = dataclasses.replace(setup, pbt=dataclasses.replace(EIGHT, every=1, min_episodes=1))
    alone = dataclasses.replace(setup, pbt=None)
    step = jax.jit(one.agent.iteration)
    population = state.inner
    standing = population.standing._replace(score_sum=100 * jnp.arange(8.0), num_scores=jnp.ones(8))
    after, _ = step(state._replace(inner=population._replace(standing=standing)))
    expected, metrics = jax.jit(alone.agent.iteration)(state._replace(inner=population.inner))
    evolved, after, expected = after.inner, innermost(after), innermost(expected)
    parent = np.asarray(evolved.standing.parent)
    score = metrics["episode_return"]
    score = (score.total + 100 * np.arange(8)) / (score.count + 1)
    worst, best = np.argsort(score)[:2], np.argsort(score)[-2:]
    assert set(parent[worst]) <= set(best) and (np.delete(parent, worst) == np.delete(np.arange(8), worst)).all()

    def check(mine, theirs, rows):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = map(jax.random.key_data, (a, b))
            np.testing.assert_allclose(a, np.asarray(b)[rows], rtol=1e-6, atol=1e-7)

    statistics = setup.agent.env.statistics
    check((after.params, after.opt_state), (expected.params, expected.opt_state), parent)
    check(statistics(after.env_state), statistics(expected.env_state), parent)
    own = lambda s: (s.key, s.actor_keys, s.obs, s.env_state.env_state)
    check(own(after), own(expected), np.arange(8))
    values, before = (np.asarray(x.inner.numbers["learning_rate"]) for x in (evolved, population))
    ratio = values / before[parent]
    kept = parent == np.arange(8)
    np.testing.assert_allclose(ratio[kept], 1)
    clipped = (values == np.float32(1e-5)) | (values == np.float32(1e-2))
    assert np.all(np.isclose(ratio[~kept], 0.8) | np.isclose(ratio[~kept], 1.2) | clipped[~kept])
    np.testing.assert_array_equal(evolved.standing.num_scores, 0)
    assert evolved.standing.since == 0


# ---- what it costs


@dataclasses.dataclass(frozen=True)
class ByMember:
    """Members, not environments, are split over the devices: in one program, or with acting apart from learning."""

    together: bool = True

    def layout(self, devices, sizes):
        actors = Placement.over("actors", devices, split=("member",))
        learners = actors if self.together else Placement.over("learners", devices, split=("member",))
        return Layout({"env": actors, "actor": actors, "learner": learners, "server": learners}, policy="ByMember()")


def collectives_by_place(compiled):
    """The numbers of collectives of a program in branches of conditionals, and elsewhere."""
    module = module_of(compiled)
    branches = {name for made in instructions(compiled) if made.kind == "conditional" for name in made.called}
    each = Counter(
        name in branches
        for name in module.computations
        for made in module.instructions(name)
        if made.kind.removesuffix("-start") in COLLECTIVES
    )
    return each[True], each[False]


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
def test_members_on_several_devices_exchange_data_in_an_exploit_only(together):
    setup, *_ = reference()
    program = setup.compile(ByMember(together), jax.devices()[:4])
    counts = list(map(collectives_by_place, program.compiled()))
    assert sum(inside for inside, _ in counts) > 0
    assert [outside for _, outside in counts] == [0] * len(counts)
    if not together:
        plan = program.explain().to_dict()
        assert plan["bytes_crossing"] == 0
        assert len(counts) == 3, "acting, learning with the decision, and copying the statistics of the environments"


@pytest.mark.parametrize(
    "policy", [pytest.param("SingleLearnerCoarse", marks=pytest.mark.long), pytest.param("Central", marks=pytest.mark.slow)]
)
def test_an_iteration_moves_scores_and_the_decision_only(policy):
    setup, *_ = reference()
    alone = dataclasses.replace(setup, pbt=None)
    with_pbt, without = (
        s.compile(msrl.policies.get(policy), jax.devices()[:2]).explain().to_dict()["bytes_crossing"] for s in (setup, alone)
    )
    # Sums and counts of scores go up. Parents for the statistics, and whether it is time, come down, and Central's new values.
    # Central's server copies the sizes of values too, three numbers of a member, which its learners have.
    sizes = 2 * 8 * 4 * 3 if policy == "Central" else 0
    assert 0 < with_pbt - without <= 8 * 4 * (2 + 1 + len(SEARCH)) + 8 + sizes
