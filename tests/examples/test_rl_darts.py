"""RL-DARTS: mixtures and cells in plain formulas, the same training under every policy, and what is claimed of the search."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from examples import rl_darts as example
from msrl_jax import algorithms
from msrl_jax.algorithms import build, counted
from tests.support.small_runs import relative_difference

pytestmark = pytest.mark.long

POLICIES = ("SingleLearnerCoarse", "SingleLearnerFine", "MultiLearner", "Central", "Environments")
SMALL = example.CellNetwork(num_nodes=2, channels=2, num_features=6)
SIZES = {
    "ppo": {"num_envs": 8, "unroll_length": 8, "num_minibatches": 2, "num_epochs": 2},
    "dqn": {"num_envs": 8, "batch_size": 16, "replay.capacity": 512, "replay.learning_starts": 64, "num_updates": 2},
}
C = 3


def small(algorithm, network: Any = SMALL):
    return algorithms.make(example.ALGORITHMS[algorithm], {"network": network, **SIZES[algorithm]})


def images(height=5, width=5, channels=C, count=2):
    return np.random.default_rng(0).normal(size=(count, height, width, channels)).astype(np.float32)


def plain_convolve(x, filters):
    """A convolution in float64, window by window, with zeros around the image."""
    x, filters = np.asarray(x, np.float64), np.asarray(filters, np.float64)
    (_, height, width, _), margin = x.shape, len(filters) // 2
    padded = np.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    out = np.zeros((*x.shape[:3], filters.shape[-1]))
    for y, z in np.ndindex(height, width):
        window = padded[:, y : y + len(filters), z : z + len(filters)]
        out[:, y, z] = np.einsum("byzc,yzcd->bd", window, filters)
    return out


def plain_max_pool(x):
    out = np.empty_like(x)
    for y, z in np.ndindex(x.shape[1:3]):
        out[:, y, z] = x[:, max(y - 1, 0) : y + 2, max(z - 1, 0) : z + 2].max((1, 2))
    return out


def plain_operation(name, x, params, edge):
    if name in example.FILTERS:
        return plain_convolve(x, params[f"{name}_{edge}"])
    return {"max_pool": plain_max_pool(x), "identity": x, "zero": np.zeros_like(x)}[name]


@pytest.mark.parametrize("shape", [(5, 5), (3, 6), (2, 4), (1, 1)])
def test_a_product_of_matrices_convolves(shape):
    x, filters = images(*shape), np.random.default_rng(1).normal(size=(5, 5, C, C)).astype(np.float32)
    found = example.convolve(jnp.asarray(x), jnp.asarray(filters))
    np.testing.assert_allclose(found, plain_convolve(x, filters), rtol=1e-4, atol=1e-4)


def test_pooling_takes_the_largest_of_each_window():
    np.testing.assert_array_equal(example.max_pool(jnp.asarray(images())), plain_max_pool(images()))


def trained_apart(network) -> Any:
    """Parameters of a supernet whose weights are not equal, and observations."""
    obs = np.random.default_rng(0).random((4, 10, 10, 4)) < 0.3
    params: Any = network.init(jax.random.key(0), obs)["params"]
    return params | {"alpha": jax.random.normal(jax.random.key(1), params["alpha"].shape) / 5}, obs


def features(network, params, obs) -> np.ndarray:
    return np.asarray(network.apply({"params": params}, obs))


def test_a_supernet_mixes_the_results_of_all_operations_on_all_edges():
    network = example.CellNetwork(channels=C, num_features=6)
    params, obs = trained_apart(network)
    weights = np.exp(10 * np.asarray(params["alpha"], np.float64))
    weights /= weights.sum(1, keepdims=True)
    stem = np.asarray(params["Conv_0"]["kernel"], np.float64)
    blocks = obs.reshape(4, 5, 2, 5, 2, 4).astype(np.float64)
    nodes = [np.maximum(np.einsum("byizjc,ijcd->byzd", blocks, stem) + params["Conv_0"]["bias"], 0)]
    rows = iter(weights)
    for n in (1, 2, 3):
        total = 0.0
        for i in range(n):
            each = [plain_operation(name, nodes[i], params, f"{i}_{n}") for name in example.OPERATIONS]
            total = total + np.tensordot(next(rows), each, 1)
        nodes.append(np.maximum(total, 0))
    x = np.concatenate(nodes[1:], -1).reshape(4, -1)
    expected = np.maximum(x @ np.asarray(params["Dense_0"]["kernel"], np.float64) + params["Dense_0"]["bias"], 0)
    assert (expected > 0).any()
    np.testing.assert_allclose(features(network, params, obs), expected, rtol=1e-4, atol=1e-4)


def a_result(network, alpha) -> Any:
    """What `discretize` reads of a run: its network, and its parameters, of an actor and of a critic."""
    torsos = {name: {"module": {"alpha": jnp.asarray(a)}} for name, a in (("actor_torso", alpha), ("critic_torso", -alpha))}
    state = types.SimpleNamespace(params={"params": torsos})
    config = types.SimpleNamespace(network=network)
    return types.SimpleNamespace(config=config, member_state=lambda member: state)


def test_a_discrete_cell_has_the_heaviest_operations_but_zero_and_two_edges_into_a_node():
    alpha = np.log(
        [  # conv3x3, conv5x5, max_pool, identity, zero
            [0.1, 0.2, 0.1, 0.1, 0.5],  # 0 to 1
            [0.3, 0.2, 0.2, 0.2, 0.1],  # 0 to 2
            [0.1, 0.1, 0.1, 0.4, 0.3],  # 1 to 2
            [0.2, 0.1, 0.3, 0.2, 0.2],  # 0 to 3
            [0.1, 0.1, 0.0001, 0.0999, 0.7],  # 1 to 3: zero does not count, so this is the lightest
            [0.2, 0.6, 0.1, 0.05, 0.05],  # 2 to 3
        ]
    )
    network = example.CellNetwork(alpha_rate=1.0)
    found = example.discretize(a_result(network, alpha))
    assert found.cell == (((0, "conv5x5"),), ((0, "conv3x3"), (1, "identity")), ((0, "max_pool"), (2, "conv5x5")))
    assert found == network.clone(cell=found.cell)
    weights = example.weights_of(network, a_result(network, alpha).member_state(0).params)
    np.testing.assert_allclose(weights, np.exp(alpha), rtol=1e-5)
    fewer = example.CellNetwork(operations=("zero", "max_pool"), num_nodes=1)
    assert example.discretize(a_result(fewer, np.array([[9.0, 0.0]]))).cell == (((0, "max_pool"),),)


def test_a_discrete_network_is_the_supernet_whose_weights_are_all_on_its_edges():
    network = example.CellNetwork(channels=C, num_features=6)
    params, obs = trained_apart(network)
    cell = (((0, "conv3x3"),), ((0, "max_pool"), (1, "conv5x5")), ((0, "identity"), (2, "conv3x3")))
    chosen = {(n, i): name for n, edges in enumerate(cell, 1) for i, name in edges}
    names = [chosen.get((n, i), "zero") for n in (1, 2, 3) for i in range(n)]
    one_hot = 1e3 * np.array([[name == each for each in example.OPERATIONS] for name in names])
    discrete = network.clone(cell=cell)
    kept: Any = discrete.init(jax.random.key(0), obs)["params"]
    assert set(kept) == {"Conv_0", "Dense_0", "conv3x3_0_1", "conv5x5_1_2", "conv3x3_2_3"}
    expected = features(network, params | {"alpha": one_hot}, obs)
    found = features(discrete, {name: params[name] for name in kept}, obs)
    assert (found > 0).any()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_entropy_is_1_for_equal_weights_and_0_for_one():
    assert example.entropy(np.full((2, 4), 0.25)) == pytest.approx(1.0)
    assert example.entropy(np.array([[0.25] * 4, [1.0, 0, 0, 0]])) == pytest.approx(0.5)


@functools.cache
def agent_and_state(algorithm):
    agent = counted(build(small(algorithm), msrl.envs.make("Breakout-MinAtar")))
    return agent, jax.jit(agent.init)(jax.random.key(0))


@functools.cache
def run(algorithm, policy, devices):
    agent, state = agent_and_state(algorithm)
    chosen = msrl.policies.get(policy)
    program = msrl.compile(agent.iteration, state, policy=chosen, axes=agent.axes, devices=jax.devices()[:devices])
    state, metrics = program.run(state, 4)
    return jax.device_get(state.inner.params), jax.device_get(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_eight_devices_search_as_one_does(algorithm, policy):
    params, _ = run(algorithm, policy, 8)
    alone, _ = run(algorithm, "GPUOnly", 1)
    first = agent_and_state(algorithm)[1].inner.params
    assert np.any(example.weights_of(SMALL, params) != example.weights_of(SMALL, first))
    for a, b, before in zip(*map(jax.tree.leaves, (params, alone, first)), strict=True):
        assert relative_difference(a, b) < 1e-4
        assert relative_difference(a, before) > 1e-3 or not np.any(a)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("dqn", marks=pytest.mark.slow)])
def test_a_search_trains_the_cell_that_it_finds_and_is_drawn(algorithm, monkeypatch):
    monkeypatch.setattr(example, "ALGORITHMS", {algorithm: small(algorithm, "auto")})
    about = {"total_steps": 512, "chunk": 2, "devices": jax.devices()[:1]}
    runs, entropies = example.search(algorithm, "Breakout", 0, SMALL, **about)
    assert [getattr(run.config.network, "cell", "no cell") is None for run in runs.values()] == [False, True, False]
    assert len(runs["discrete cell"].config.network.cell) == 2 and entropies[-1] < 1
    assert all(run.history["step"][-1] == 512 for run in runs.values())
    svg = example.figure({"a game": [(runs, entropies)] * 2})
    assert all(svg.count(f">{name}<") == 1 for name in (*example.NETWORKS, "the search")) and svg.count(">a game<") == 2


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", example.ALGORITHMS)
def test_a_supernet_costs_less_than_three_times_the_cnn(algorithm):
    (cnn, _), (supernet, _) = example.costs(algorithm, ["cnn", example.CellNetwork()], rounds=1)
    assert cnn < supernet < 3 * cnn


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", example.ALGORITHMS)
def test_weights_become_unequal_and_the_cell_found_learns_about_as_well_as_the_cnn(algorithm):
    searches = [example.search(algorithm, "Breakout", seed) for seed in range(3)]
    assert all(entropies[-1] < 0.95 and entropies[-1] < entropies[0] for _, entropies in searches)
    cnn, discrete = (np.mean([example.late(runs[name]) for runs, _ in searches]) for name in ("CNN", "discrete cell"))
    assert discrete > 0.8 * cnn > 3
