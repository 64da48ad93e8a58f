"""Several agents: one agent trains as alone, policies agree, absent agents do not count, and nothing crosses in vain."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.algorithms.ppo import ppo_loss
from msrl_jax.networks.distributions import Categorical
from msrl_jax.networks.modules import as_network
from msrl_jax.registry.lookup import check_env
from msrl_jax.returns import standardize
from tests.support.agents import make_counted
from tests.support.leaving import Leaving
from tests.support.many_agents import Alone, Homes
from tests.support.modules import FORMS
from tests.support.slow import mostly_slow

SMALL = {"num_envs": 16, "unroll_length": 8, "hidden_sizes": (8,), "num_epochs": 2, "num_minibatches": 2}
RECURRENT = {"core": "gru:8"}

REPLAY = {
    "num_epochs": None,
    "num_minibatches": None,
    "replay.learning_starts": 128,
    "batch_size": 16,
    "num_updates": 2,
    "replay.capacity": 2048,
    "trace_length": 4,
    "mixing_size": 4,
    "hyper_size": 4,
}


def build(algo, env, **options):
    fields = options if algo == "teams" else {k: v for k, v in {**SMALL, **options}.items() if v is not None}
    return make_counted(algo, env, **fields)


@pytest.mark.long
@pytest.mark.parametrize("core", mostly_slow(["none", "gru"], "none"))
def test_one_agent_trains_as_alone(core):
    """Bit for bit; with a power of two of examples, so that the mean over those that count divides as the plain mean."""
    env = Homes(num_agents=1)
    options = {"learning_rate": 1e-3, **(RECURRENT if core == "gru" else {})}
    alone = build("recurrent_ppo" if core == "gru" else "ppo", Alone(env), normalize_values=False, **options)
    team = build("ippo", env, **options)
    states = [jax.jit(agent.init)(jax.random.key(3)) for agent in (alone, team)]
    for agent, i in ((alone, 0), (team, 1)):
        states[i], metrics = jax.jit(lambda s, agent=agent: jax.lax.scan(lambda s, _: agent.iteration(s), s, None, length=3))(
            states[i]
        )
    states = [state.inner for state in states]
    jax.tree.map(np.testing.assert_array_equal, states[0].params, states[1].params["agents"])
    np.testing.assert_array_equal(states[0].obs, states[1].now["agents"].obs[:, 0])
    assert float(metrics["episode_length"].total.sum()) > 0


def seen(state):
    """What the agents see next, which tells whether all that was done before is the same."""
    now = getattr(state.inner, "now", None)
    return {name: jax.tree.leaves(now[name].obs if now else state.inner.obs)[0] for name in now or ("agents",)}


CASES = {
    "ippo": ("ippo", {}),
    "mappo-own": ("mappo", {"share_parameters": False}),
    "mappo-own-gru": ("mappo", {"share_parameters": False, "normalize_values": True, **RECURRENT}),
    "ippo-ids-gru": ("ippo", {"agent_ids": True, **RECURRENT}),
    "qmix": ("qmix", {"core.size": 8, **REPLAY}),
    "maddpg": ("maddpg", {**REPLAY, "trace_length": None, "mixing_size": None, "hyper_size": None, "replay.n_step": 2}),
    "self_play": ("self_play", {"num_opponents": 2, "pool_size": 2, "pool_period": 2, "latest_share": 0.5}),
    "self_play-payoff": (
        "self_play",
        {"num_opponents": 2, "pool_size": 2, "pool_period": 1, "latest_share": 0.0, "opponents": "payoff"},
    ),
    "alphazero": (
        "alphazero",
        {
            **REPLAY,
            "num_epochs": None,
            "num_minibatches": None,
            "replay.learning_starts": None,
            "trace_length": None,
            "mixing_size": None,
            "hyper_size": None,
            "num_simulations": 4,
            "network": "mlp",
        },
    ),
    "muzero": (
        "muzero",
        {
            **REPLAY,
            "num_epochs": None,
            "num_minibatches": None,
            "trace_length": None,
            "mixing_size": None,
            "hyper_size": None,
            "num_simulations": 4,
            "model_steps": 2,
            "replay.n_step": 2,
            "latent_size": 8,
            "network": "mlp",
        },
    ),
    "mappo-nnx": ("mappo", {"network": as_network(FORMS["nnx"]), "share_parameters": False, "core": "gru:8"}),
    "vdn-own": ("vdn", {"core": "none", "share_parameters": False, **REPLAY, "mixing_size": None, "hyper_size": None}),
    "teams": (
        "teams",
        {
            "num_envs": 16,
            "unroll_length": 8,
            "teams": {
                "one": "mappo:agents=walker_0|walker_2,share_parameters=False,core=gru(8),hidden_sizes=(8,)",
                "two": "qmix:agents=walker_1,core=none,hidden_sizes=(8,),batch_size=16,num_updates=2,"
                "replay.learning_starts=128,replay.capacity=2048,trace_length=4,mixing_size=4,hyper_size=4",
            },
        },
    ),
}
ITERATIONS = 3


@functools.cache
def agent_and_state(case):
    """The agent and its first state."""
    algo, options = CASES[case]
    game = {"self_play": "KuhnPoker", "alphazero": "pgx:tic_tac_toe", "muzero": "pgx:tic_tac_toe"}.get(algo)
    agent = build(algo, msrl.envs.make(game) if game else Homes(), **options)
    return agent, jax.jit(agent.init)(jax.random.key(0))


@functools.cache
def reference(case):
    """The states and metrics of plain `jit(scan)`."""
    agent, state = agent_and_state(case)

    def step(state, _):
        state, metrics = agent.iteration(state)
        return state, (seen(state), metrics)

    return jax.device_get(jax.jit(lambda s: jax.lax.scan(step, s, None, length=ITERATIONS))(state))


SELDOM = [
    ("mappo-own-gru", 8, "Central"),
    ("maddpg", 4, "Environments"),
    ("qmix", 8, "MultiLearner"),
    ("alphazero", 8, "SingleLearnerCoarse"),
]


def kind(*run):
    """A run of the matrix: long if it runs seldom, and else slow."""
    return pytest.param(*run, marks=pytest.mark.long if run in SELDOM else pytest.mark.slow)


POLICIES = sorted(msrl.policies.POLICIES)
# On eight devices under all policies, on fewer under one: these take turns, so all cases together see every number of devices
# under every policy.
RUNS = [
    *SELDOM,
    *((case, 8, policy) for case in CASES for policy in POLICIES),
    *((case, n, POLICIES[(i + n) % len(POLICIES)]) for i, case in enumerate(CASES) for n in (1, 2, 4)),
]
MATRIX = [kind(*run) for run in dict.fromkeys(RUNS)]


@pytest.mark.parametrize(("case", "devices", "policy"), MATRIX)
def test_equal_under_every_policy(case, devices, policy):
    (agent, state), (final, (obs, _)) = agent_and_state(case), reference(case)
    program = msrl.compile(
        agent.iteration,
        state,
        policy=msrl.policies.get(policy),
        axes=agent.axes,
        groups={"env": agent.env_group},
        devices=jax.devices()[:devices],
    )
    state = program.place(state)
    for i in range(ITERATIONS):
        state, _ = program.run(state, 1)
        for name, got in seen(state).items():
            np.testing.assert_allclose(got, obs[name][i], rtol=1e-5, atol=1e-5)
    for got, want in zip(jax.tree.leaves(state.inner.params), jax.tree.leaves(final.inner.params), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_networks_of_agents_stay_on_their_devices(devices):
    """With three agents on one device or three, only observations, actions, rewards and states cross; no network does."""
    agent, state = agent_and_state("mappo-own")
    policy = msrl.policies.Environments(envs=2, agents=devices)
    program = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=jax.devices()[: 2 + devices])
    placed = program.place(state)
    kernel = jax.tree.leaves(placed.inner.params)[0]
    assert kernel.shape[0] == 3 and kernel.sharding.num_devices == devices
    assert kernel.addressable_shards[0].data.shape[0] == 3 // devices
    plan = program.explain()
    values = {c.value for c in plan.crossings}
    assert any("obs" in value for value in values) and not [value for value in values if "params" in value], values
    # The agents learn without a word to each other; the means of six metrics over them are all.
    assert plan.bytes_of_collectives["agents"] == (24 if devices == 3 else 0)


def test_absent_agents_count_for_nothing():
    """The loss of examples that count, and their standardized advantages, are those of the others left out."""
    rng = np.random.default_rng(0)
    logits, x = rng.normal(size=(12, 3)).astype(np.float32), rng.normal(size=(6, 12)).astype(np.float32)
    counts = np.arange(12) % 3 != 0
    config = msrl.algorithms.PPO(clip_ratio=0.2, clip_value=None, value_coef=0.5, entropy_coef=0.01)

    def loss(keep, counts):
        value, log_prob, advantage, old_value, target = (jnp.asarray(row[keep]) for row in x[:5])
        action = jnp.asarray(np.arange(12)[keep] % 3)
        taken = SimpleNamespace(action=action, log_prob=log_prob - 1, valid=counts)
        advantage = standardize(advantage, counts)
        policy = Categorical(jnp.asarray(logits[keep]))
        return ppo_loss(config, policy, value, taken, advantage, old_value, target)

    total, stats = loss(slice(None), jnp.asarray(counts))
    want, want_stats = loss(counts, None)
    np.testing.assert_allclose(total, want, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), stats, want_stats)


def test_wrong_kinds_of_environments_are_refused():
    with pytest.raises(TypeError, match=r"'ppo' trains one agent, but environment 'Homes' has 3; use alphazero, ippo"):
        msrl.train("ppo", Homes(), total_steps=100)
    with pytest.raises(TypeError, match=r"'bc' .*; no algorithm that learns from data alone trains several agents"):
        check_env(msrl.algorithms.get("bc"), Homes())
    with pytest.raises(TypeError, match=r"'mappo' trains several agents, but environment 'CartPole-v1' has one"):
        msrl.train("mappo", "CartPole-v1", total_steps=100)


@pytest.mark.slow
def test_maddpg_evaluates_agents_with_their_own_networks_and_takes_legal_actions_only():
    """An illegal action would make its return nan."""
    options = {**SMALL, **REPLAY, "trace_length": None, "mixing_size": None, "hyper_size": None, "learning_rate": 0.03}
    options = {name: value for name, value in options.items() if value is not None}
    result = msrl.train("maddpg", Leaving(), total_steps=2560, chunk=5, **options)
    returns = result.history["episode_return"]
    # Every agent is paid its action plus 1 while it is there: the best returns are 4, 4 + 3 + 4 and 4 + 3.
    assert np.isfinite(returns).all() and returns[-1] > returns[0] + 2 and returns.max() <= 22
    evaluation = result.evaluate(episodes=4)
    assert np.isfinite(evaluation.returns).all() and evaluation.mean_return > returns[0] + 3
