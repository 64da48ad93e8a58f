"""Population based training: its two steps by hand, the paper's toy problem, and runs that are the same everywhere."""

import dataclasses
import functools
import json
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import cli, envs
from msrl_jax.policies import Layout, Placement
from msrl_jax.training import Result, RunFolderError
from msrl_jax.training.evolving import Standing, exploit, explore
from msrl_jax.training.lineage import copies
from msrl_jax.training.pbt import read
from msrl_jax.training.setup import resolve
from msrl_jax.training.skipping import learned
from tests.algorithms.random_walk import RandomWalk
from tests.training.runs import assert_same_run, stop_after

RATE = envs.log_uniform(1e-5, 1e-2)
SEARCH = {"learning_rate": RATE, "entropy_coef": envs.uniform(0, 0.1)}
ENV, STEPS = "CartPole-v1:max_steps_in_episode=30", 64
SMALL = {
    "num_envs": 8, "unroll_length": 8, "num_epochs": 1, "num_minibatches": 2, "hidden_sizes": (8,),
    "normalize_observations": True,
}  # fmt: skip
EIGHT = msrl.PBT(search=SEARCH, members=8, every=2, fraction=0.25)


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def parents(pbt, score, ready=None, seed=0):
    ready = np.ones(len(score), bool) if ready is None else np.array(ready)
    return np.asarray(exploit(pbt, jnp.float32(score), ready, keys(len(score), seed)))


# ---- exploit and explore


@pytest.mark.parametrize(("fraction", "replaced"), [(0.2, 2), (0.25, 2), (0.3, 3), (0.5, 5), (0.01, 1)])
def test_truncation_replaces_the_worst_by_the_best(fraction, replaced):
    pbt = msrl.PBT(search=SEARCH, members=10, fraction=fraction)
    score = np.random.default_rng(0).permutation(10)
    best, worst = np.argsort(score)[-replaced:], np.argsort(score)[:replaced]
    seen = set()
    for seed in range(60):
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
    assert opponents == [{0, 2}, {0, 1, 2, 4}, {2}, {0, 1, 2, 3, 4} - {3}, {0, 2, 4}] or opponents[3] == {0, 1, 2, 4}


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
    true = lambda theta: 1.2 - jnp.square(theta).sum(-1)  # noqa: E731
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
