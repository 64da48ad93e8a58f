"""What critics alone see: it makes their values right, and neither actors nor their devices get it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import data, envs
from msrl_jax.agents.agent import innermost
from msrl_jax.algorithms import Replay, build, counted, get
from msrl_jax.fragments.metrics import Mean
from msrl_jax.networks.custom_network import CustomNetworks
from msrl_jax.networks.modules import as_network
from msrl_jax.policies import Layout, Placement
from msrl_jax.registry.lookup import check_env
from tests.support.modules import FORMS, Head
from tests.support.privileged import Seen, Unseen, cartpole, pendulum
from tests.support.small_runs import PARTICULAR, SMALL

FLOATS = envs.Box(-1, 1, (1,))
ON = {"num_envs": 32, "unroll_length": 16, "hidden_sizes": (16,), "discount": 0.5, "learning_rate": 3e-3}
OFF = {
    "num_envs": 16,
    "hidden_sizes": (32,),
    "discount": 0.5,
    "learning_rate": 1e-2,
    "batch_size": 64,
    "replay.capacity": 2048,
    "replay.learning_starts": 64,
    "num_updates": 8,
    "tau": 0.05,
}
LEARNING = {
    "ppo": ON,
    "recurrent_ppo": ON | {"core.size": 8},
    "impala": ON,
    "a2c": ON,
    "a3c": ON | {"num_workers": 2},
    "a3c+memory": ON | {"num_workers": 2, "core": "gru:8"},
    "sac": OFF | {"initial_temperature": 1e-3, "learn_temperature": False},
    "td3": OFF,
    "iql": {name: OFF[name] for name in ("hidden_sizes", "discount", "learning_rate", "batch_size", "tau")}
    | {"num_updates": 8, "normalize_rewards": False},
}
LEARNING["cql"] = {name: x for name, x in LEARNING["iql"].items() if name != "normalize_rewards"}
LEARNING["cql"] |= {"conservative_weight": 0.0, "initial_temperature": 1e-3, "learn_temperature": False}
ALGORITHMS = sorted(LEARNING)


def recorded(env, steps=400):
    """The steps of random actions in two copies of an environment."""
    result = msrl.train(
        "ppo",
        env,
        total_steps=8,
        num_envs=4,
        unroll_length=2,
        num_minibatches=1,
        hidden_sizes=(4,),
        progress=False,
        eval_episodes=0,
    )
    return data.record(result, steps, num_envs=2)


def loss_of_values(algorithm, env, iterations):
    """The mean squared error of values at the end of training, halved."""
    options = LEARNING[algorithm] | ({"data": recorded(env)} if algorithm in ("iql", "cql") else {})
    agent = counted(msrl.algorithms.build(msrl.algorithms.make(algorithm.partition("+")[0], options), env), None)

    def run(key):
        return jax.lax.scan(lambda state, _: agent.iteration(state), agent.with_data(agent.init(key)), None, iterations)[1]

    metrics = jax.jit(run)(jax.random.key(0))
    loss = metrics["value_loss" if algorithm in ON_POLICY else "critic_loss"]
    loss = loss.total / loss.count if isinstance(loss, Mean) else loss
    return float(np.mean(loss[-4:]))


ON_POLICY = ("ppo", "recurrent_ppo", "impala", "a2c", "a3c", "a3c+memory")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_are_right_if_the_critic_sees_what_they_depend_on(algorithm):
    # A state is worth 2 or -2, and nobody but the critic knows which; truncated episodes bootstrap from what it sees.
    space = envs.Discrete(2) if algorithm in (*ON_POLICY, "iql") else FLOATS
    assert loss_of_values(algorithm, Seen(space), 200) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_nobody_can_know_the_values_of_the_same_environment_without_it(algorithm):
    space = envs.Discrete(2) if algorithm == "ppo" else FLOATS
    assert loss_of_values(algorithm, envs.Unprivileged(Seen(space)), 200) > 0.4


MODULE, WHOLE = {"network": as_network(FORMS["linen"])}, as_network(CustomNetworks(Head(2), Head(1)))


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [(name.partition("+")[0], {"core": "gru"} if "+" in name else {}) for name in (*ALGORITHMS, "ddpg")]
    + [("ppo", MODULE), ("sac", MODULE), ("ppo", {"network": WHOLE}), ("ppo", {"network": "simba"})],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_only_the_critic_has_parameters_for_it(algorithm, options):
    env = pendulum() if algorithm in ("sac", "td3", "ddpg", "cql") else cartpole()
    sizes = {} if "network" in options and options["network"] is not MODULE["network"] else {"hidden_sizes": (16,)}
    agent = msrl.algorithms.build(msrl.algorithms.make(algorithm, sizes | options), env)
    params = jax.eval_shape(agent.init, jax.random.key(0)).params
    inputs = {"actor": set(), "critic": set()}
    for path, x in jax.tree.leaves_with_path(params):
        where = jax.tree_util.keystr(path)
        if where.endswith("['kernel']"):
            inputs["critic" if "critic" in where or where.startswith("['value']") else "actor"].add(x.shape[-2])
    # Four numbers of the cart, or three of the pendulum and an action, which a module of one's own does not get. With a memory,
    # its outputs besides.
    of_critic = 4 + 64 if algorithm == "recurrent_ppo" or "core" in options else 3 if algorithm == "sac" and options else 4
    assert env.visible in inputs["actor"] - inputs["critic"] and of_critic in inputs["critic"] - inputs["actor"]


class Pictured(Unseen):
    """Critics see a picture."""

    def privileged_state(self, state):
        return jnp.full((6, 6, 1), state.sign)


@pytest.mark.parametrize("algorithm", ["ppo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("recurrent_ppo", "sac"))])
def test_each_part_has_the_network_of_its_space(algorithm):
    agent = counted(build(get(algorithm)(), Pictured()), None)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    convolutions = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(state.inner.params) if "Conv" in str(p)]
    assert convolutions and all("critic" in name for name in convolutions)
    assert jax.eval_shape(agent.iteration, state)[0] == state


class Apart:
    """Environments, actors and the learner each on a device of their own."""

    def layout(self, devices, sizes):
        env, actor, learner = (Placement.over(name, [devices[i]]) for i, name in enumerate(("envs", "actors", "learners")))
        return Layout({"env": env, "actor": actor, "learner": learner, "server": learner, "buffer": learner}, policy="Apart()")


def number_of(tree):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("algorithm", ["ppo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("recurrent_ppo", "sac"))])
def test_no_actor_gets_what_only_the_critic_sees(algorithm):
    env, copies, steps = pendulum() if algorithm == "sac" else cartpole(), SMALL["num_envs"], SMALL["unroll_length"]
    agent = counted(msrl.algorithms.build(msrl.algorithms.make(algorithm, SMALL | PARTICULAR[algorithm]), env), None)
    state = jax.jit(agent.init)(jax.random.key(0))
    plan = msrl.compile(agent.iteration, state, policy=Apart(), axes=agent.axes, devices=jax.devices()[:3]).explain()
    to_actors = [c for c in plan.crossings if c.destination == "actors"]
    assert not [c for c in to_actors if "privileged" in c.value or "critic" in c.value]
    # Of the environments, an actor gets two numbers for each action. Of the learner, it gets its own parameters, and the number
    # of their version. An actor with a memory gets to know when episodes begin, the last observations of episodes, which the
    # value of a memory's outputs needs, and when they were truncated; and its memory once per iteration, cleared at their ends.
    params = innermost(state).params
    if algorithm == "sac":
        own = params["actor"]
    elif algorithm == "ppo":
        own = {name: x for name, x in params["params"].items() if name.startswith("actor")}
    else:
        heads = {name: x for name, x in params["heads"]["params"].items() if name.startswith("actor")}
        own = [params["torso"], params["core"], heads]
    memory = number_of(innermost(state).carry) if algorithm == "recurrent_ppo" else 0
    remembering = copies * steps * (4 * env.visible + 2) + 4 * memory if memory else 0
    arriving = 4 * copies * steps * env.visible + 4 * number_of(own) + 4 + remembering
    assert sum(c.nbytes * c.times for c in to_actors) == arriving
    # The learner gets it once for each step and once for each successor.
    got = sum(c.nbytes * c.times for c in plan.crossings if c.destination == "learners" and "privileged" in c.value)
    assert got == 4 * 2 * copies * steps * env.env.observation_space.shape[0]


@pytest.mark.slow
def test_a_trained_policy_needs_only_what_actors_see():
    result = msrl.train(
        "ppo",
        cartpole(),
        num_envs=8,
        unroll_length=8,
        hidden_sizes=(8,),
        num_minibatches=2,
        total_steps=256,
        progress=False,
        normalize_observations=True,
        eval_episodes=0,
        seeds=2,
    )
    obs = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    state = jax.device_get(result.member_state(1))
    running = state.env_state.running
    x = np.clip((obs - running.mean.obs) / np.sqrt(running.var.obs + 1e-8), -10, 10)
    params = state.params["params"]
    layers = params["actor_torso"]["Dense_0"], params["actor_head"]
    x = np.tanh(x @ layers[0]["kernel"] + layers[0]["bias"])
    logits = x @ layers[1]["kernel"] + layers[1]["bias"]
    np.testing.assert_allclose(result.probabilities(obs, member=1), jax.nn.softmax(logits), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(result.act(obs, member=1), logits.argmax(-1))
    assert running.mean.privileged_state.shape == (4,)
    with pytest.raises(ValueError, match="observations have shape"):
        result.act(np.zeros(4))


@pytest.mark.slow
def test_offline_and_replayed_data_have_it_too():
    known = recorded(cartpole())
    np.testing.assert_array_equal(known.obs.obs, known.obs.privileged_state[:, :2])
    np.testing.assert_array_equal(known.next_obs.obs, known.next_obs.privileged_state[:, :2])
    plain = dataclasses.replace(known, obs=known.obs.obs, next_obs=known.next_obs.obs)
    with pytest.raises(ValueError, match=r"the data set has obs, but the observation_space of .* obs/privileged_state"):
        get("iql")(data=plain).build(cartpole())
    seen = {"privileged_state": np.zeros((len(plain), 4), np.float32)}
    of_dicts = dataclasses.replace(plain, obs=seen | {"obs": plain.obs}, next_obs=seen | {"obs": plain.next_obs})
    get("iql")(data=of_dicts, batch_size=32).build(cartpole())
    rows = np.random.default_rng(0).uniform(-0.5, 0.5, (200, 3)).astype(np.float32)
    obs = {"obs": rows[:, :2], "privileged_state": rows}
    given = data.Dataset(obs, rows[:, :1], rows[:, 0], rows[:, 0] > 1, rows[:, 0] > 0.4, obs)
    config = get("sac")(
        data=given, num_envs=8, batch_size=32, replay=Replay(1024, n_step=3, storage="bfloat16", learning_starts=64)
    )
    agent = counted(config.build(pendulum()), None)

    def run(key):
        return jax.lax.scan(lambda state, _: agent.iteration(state), agent.with_data(agent.init(key)), None, 8)

    state, metrics = jax.jit(run)(jax.random.key(0))
    assert np.isfinite(metrics["critic_loss"].total).all() and metrics["critic_loss"].count[-1] > 0
    stored = innermost(state).replay.items[:2]
    assert [(x.dtype, x.shape[-1]) for x in stored] == [(jnp.bfloat16, 2), (jnp.float32, 3)]


@pytest.mark.parametrize("algorithm", ["es", "dqn", "r2d2", "pqn", "bc"])
def test_other_algorithms_refuse_it(algorithm):
    with pytest.raises(TypeError, match=rf"{algorithm!r} does not take one; use a2c, a2c_rnd, a3c, cql, ddpg, .*Unprivileged"):
        check_env(get(algorithm), cartpole())
    check_env(get(algorithm), envs.Unprivileged(cartpole()))


def test_actors_and_critics_share_no_torso():
    with pytest.raises(ValueError, match="shared_torso=True: the critic sees the environment's privileged_state"):
        get("ppo")(shared_torso=True).build(cartpole())
    get("ppo")(shared_torso=True).build(Unseen())
    with pytest.raises(ValueError, match="shared_torso=True: the critic sees the environment's privileged_state"):
        build(get("a2c")(core="gru", shared_torso=True), cartpole())
    with pytest.raises(ValueError, match="no place for a core"):
        build(get("recurrent_ppo")(network=WHOLE), cartpole())
