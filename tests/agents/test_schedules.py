"""Numbers that change over the run: their values, what an iteration sees of them, and what is refused."""

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import msrl_jax as msrl
from msrl_jax.agents.adaptive_rate import AdaptiveRate
from msrl_jax.agents.agent import Agent, Progress
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.agents.schedules import read_kl, read_schedule
from msrl_jax.algorithms import DQN, PPO, build, counted
from msrl_jax.configs.config import config, tunable
from msrl_jax.fragments.counters import counter
from msrl_jax.loops.divergence import apply_gradients, no_divergence, update_divergence
from msrl_jax.registry import resolve
from tests.support.transformations import halving

TINY = {"num_envs": 4, "unroll_length": 4, "num_epochs": 2, "num_minibatches": 2, "hidden_sizes": (4,)}
LENGTH = 8
"""Iterations of a run."""


@pytest.mark.parametrize(
    ("text", "progress", "value"),
    [
        ("linear:4", 0.25, 3.0),
        ("linear:4:2", 0.5, 3.0),
        ("linear:2:4", 0.75, 3.5),
        ("linear:4:2", 1.0, 2.0),
        ("linear:4:2", 1.5, 2.0),
        ("cosine:4", 0.5, 2.0),
        ("cosine:4:2", 0.0, 4.0),
        ("cosine:4:2", 1 / 3, 3.5),
        ("cosine:4:2", 1.0, 2.0),
        ("linear:4,warmup=0.2", 0.1, 2.0),
        ("linear:4,warmup=0.2", 0.2, 4.0),
        ("linear:4:2,warmup=0.2", 0.6, 3.0),
        ("cosine:4:2,warmup=0.5", 0.0, 0.0),
        ("cosine:4:2,warmup=0.5", 0.75, 3.0),
    ],
)
def test_schedules_have_the_values_worked_out_by_hand(text, progress, value):
    np.testing.assert_allclose(read_schedule(text)(jnp.float32(progress)), value, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(read_schedule(text)(np.float32(progress)), value, rtol=1e-6, atol=1e-6)


def test_a_cosine_with_a_warmup_is_that_of_optax():
    want = optax.warmup_cosine_decay_schedule(0.0, 3e-4, warmup_steps=10, decay_steps=100, end_value=1e-5)
    got = [read_schedule("cosine:3e-4:1e-5,warmup=0.1")(jnp.float32(step / 100)) for step in range(101)]
    np.testing.assert_allclose(got, [want(step) for step in range(101)], rtol=1e-4)


@pytest.fixture
def echo(monkeypatch):
    """An algorithm that reports its numbers, and acts with them."""
    monkeypatch.setattr(sys.modules[config.__module__], "DECLARED", {})

    @config("echo")
    class Echo:
        learning_rate: float = tunable(default=1.0, above=0, doc="a number.")
        entropy_coef: float | None = tunable(default=0.1, low=0, doc="a number.")

        def build(self, env):
            agent = DQN(num_envs=4, hidden_sizes=(4,)).build(env)

            def iteration(state, progress):
                return state, {"rate": jnp.float32(self.learning_rate), "bonus": jnp.float32(self.entropy_coef)}

            acts = lambda state, obs, *key_and_carry: jnp.float32(self.entropy_coef)
            return dataclasses.replace(agent, iteration=iteration, act=acts, probabilities=acts)

    return Echo


def run(agent: Agent, length=LENGTH):
    state = jax.jit(agent.init)(jax.random.key(0))
    return jax.jit(lambda state: jax.lax.scan(lambda s, _: agent.iteration(s), state, None, length=length))(state)


def test_an_iteration_has_the_values_of_its_progress_and_the_agent_acts_with_the_last_ones(echo):
    algorithm = echo(learning_rate="linear:8", entropy_coef=lambda progress: jnp.exp(-progress))
    agent = counted(build(algorithm, msrl.envs.make("CartPole-v1")), LENGTH)
    state, metrics = run(agent)
    np.testing.assert_allclose(metrics["rate"], 8 - np.arange(8), rtol=1e-6)
    np.testing.assert_allclose(metrics["bonus"], np.exp(-np.arange(8) / 8), rtol=1e-6)
    for found in (agent.act(state, None, None, ()), agent.probabilities(state, None)):
        np.testing.assert_allclose(found, math.exp(-7 / 8), rtol=1e-6)
    with pytest.raises(ValueError, match=r"schedules of learning_rate, entropy_coef need the length of the run"):
        run(counted(build(algorithm, msrl.envs.make("CartPole-v1"))))


def lowered(**fields):
    agent = counted(build(PPO(**TINY, **fields), msrl.envs.make("CartPole-v1")), LENGTH)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    return jax.jit(agent.iteration).lower(state).as_text()


def loops(text):
    """The numbers of operations in the while loops and the functions of a program."""
    depth, inside = 0, 0
    for line in text.splitlines():
        depth += line.count("{") - line.count("}")
        inside += depth > 2 and "stablehlo." in line
    return inside


@pytest.mark.long
def test_what_is_not_used_adds_no_instruction_and_a_schedule_adds_none_to_the_loops():
    plain = lowered()
    assert lowered(optimizer="adam:b1=0.9") == plain
    constant = lowered(learning_rate="linear:3e-3:1e-3", entropy_coef="cosine:0.01:0.001")
    assert loops(constant) <= loops(plain) and len(constant) > len(plain)


def test_a_rate_adapts_as_in_rsl_rl():
    kl, state = read_kl("kl:0.01,start=1e-3,low=5e-4,high=2e-3"), AdaptiveRate(jnp.float32(1e-3))
    rate, wanted, got = 1e-3, [], []
    for divergence in [0.0, 0.03, 0.03, 0.02, 0.005, 0.001, 0.001, 0.001, 0.004, math.nan, 0.5, 0.01]:
        if divergence > 2 * kl.target:
            rate = max(5e-4, rate / 1.5)
        elif 0 < divergence < kl.target / 2:
            rate = min(2e-3, rate * 1.5)
        state = kl.adapted(state, jnp.float32(divergence))
        wanted.append(rate)
        got.append(state.rate)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_updates_of_ppo_take_the_adapted_rate():
    """The gradients of a run with a constant rate, applied again by optax with the rate that their divergence asks for."""
    algorithm = resolve.objects(PPO(**TINY, learning_rate="kl:0.01,start=0.1,high=1", max_grad_norm=None, target_kl=0.2))
    optimizer = make_optimizer(algorithm, epsilon=1e-5)
    divergences = jnp.array([0.001, 0.03, 0.015, 0.001, 0.3, 0.5, 0.5, 0.001])

    params = {"x": jnp.arange(3.0)}
    got, opt_state, divergence = params, optimizer.init(params), no_divergence(algorithm)
    for i, kl in enumerate(divergences):
        divergence = update_divergence(algorithm, divergence, kl)
        got, opt_state = apply_gradients(algorithm, optimizer, got, opt_state, {"x": got["x"] - i}, None, divergence)
    rates = [0.1, 0.1 / 1.5, 0.1 / 1.5, 0.1]  # the first one is none; the fifth ends the updates, and changes the rate last
    adam = optax.scale_by_adam(eps=1e-5)
    state = adam.init(params)
    for i, rate in enumerate(rates):
        direction, state = adam.update({"x": params["x"] - i}, state)
        params = {"x": params["x"] - rate * direction["x"]}
    np.testing.assert_allclose(got["x"], params["x"], rtol=1e-5)
    np.testing.assert_allclose(algorithm.learning_rate.rate_in(opt_state), 0.1 / 1.5, rtol=1e-6)


FORM = "use linear:FROM:TO or cosine:FROM:TO"
WRONG = {
    "misspelt": ({"learning_rate": "linaer:3e-4"}, "'linaer:3e-4': use a number, .*did you mean 'linear'"),
    "empty": ({"learning_rate": "linear"}, "use a finite number above 0, or a schedule, such as 'linear:0.1'"),
    "booleans": ({"learning_rate": "linear:True"}, FORM),
    "target": ({"learning_rate": "kl:True"}, "use kl:TARGET"),
    "unknown": ({"learning_rate": "linear:1,warm=0.1"}, FORM),
    "warmup": ({"learning_rate": "linear:1,warmup=1"}, "use a warmup of at least 0 and below 1"),
    "bounds": ({"gae_lambda": "linear:0.5:1.5"}, "at the progress 0.51 it is 1.01, and should be .* at least 0 and at most 1"),
    "negative": ({"learning_rate": "cosine:-1"}, "at the progress 0 it is -1"),
    "nan": ({"entropy_coef": lambda p: jnp.sqrt(0.5 - p)}, r"PPO.entropy_coef=.*<lambda>: at the progress 0.51 it is nan"),
    "branch": ({"entropy_coef": lambda p: 0.1 if p < 0.5 else 0.2}, "<lambda> fails: TracerBoolConversionError"),
    "shape": ({"entropy_coef": lambda p: jnp.ones(3)}, "<lambda> fails: TypeError: it returns"),
    "nothing": ({"entropy_coef": lambda p: None}, "<lambda> fails: .* returns a number"),
    "members": ({"learning_rate": ["linear:3e-4", 1e-3]}, "use a number for each member"),
    "annealed": ({"learning_rate": "linear:1e-3", "anneal_learning_rate": True}, "anneal_learning_rate has no effect"),
    "kl of another field": ({"clip_ratio": "kl:0.01"}, "only the learning rates of ippo, mappo, ppo, ppo_rnd, recurr"),
    "kl": ({"learning_rate": "kl:0"}, "use a target above 0"),
    "kl bounds": ({"learning_rate": "kl:0.01,start=1"}, "0 < low <= start <= high"),
    "rollback": ({"learning_rate": "kl:0.01", "guard": "rollback"}, 'guard="rollback" halves a learning rate'),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_schedule_is_refused_in_words_before_anything_compiles(case, monkeypatch):
    fields, message = WRONG[case]
    monkeypatch.setattr(msrl.fragments.Program, "run", None)
    with pytest.raises((ValueError, TypeError), match=message):
        msrl.train("ppo", **{"total_steps": 32 * 128, "progress": False} | fields)


def test_only_algorithms_with_proximal_updates_adapt_their_rate():
    with pytest.raises(ValueError, match=r"DQN.learning_rate='kl:0.01': use a number or a schedule: only"):
        resolve.check(DQN(learning_rate="kl:0.01"))
    assert halving(0.5) == 0.75
    (schedule,) = resolve.check(PPO(clip_ratio="tests.support.transformations:halving")).values()
    assert schedule is halving


def test_what_is_read_once_cannot_change():
    for algorithm in ("sac", "cql"):
        config = msrl.algorithms.get(algorithm)(initial_temperature="linear:1:0.1")
        with pytest.raises(ValueError, match=r"initial_temperature='linear:1:0.1': use a number, which is read once"):
            resolve.check(config)


@pytest.mark.parametrize(
    "word",
    [{"learning_rate": "linear:0.1"}, {"entropy_coef": halving}, {"optimizer": "sgd:momentum=0.9"}, {"network": "m:net"}],
)
def test_build_of_a_config_itself_takes_plain_values_only(word):
    (name,) = word
    with pytest.raises(ValueError, match=rf"PPO.{name}=.* is not resolved yet; call msrl_jax.algorithms.build"):
        PPO(**word).build(msrl.envs.make("CartPole-v1"))


@pytest.mark.slow
def test_teams_follow_their_own_schedules():
    from tests.support.many_agents import Homes

    team = "walker=ippo:hidden_sizes=(4,),num_minibatches=2,num_epochs=1,learning_rate='linear:8e-3',entropy_coef='cosine:0.1'"
    agent = counted(msrl.algorithms.Teams(num_envs=8, unroll_length=4, teams=(team,)).build(Homes(2)), LENGTH)
    _, metrics = run(agent, 3)
    rates = next(x for name, x in metrics.items() if name.endswith("learning_rate"))
    np.testing.assert_allclose(rates, [8e-3, 7e-3, 6e-3], rtol=1e-6)


def test_progress_of_a_long_run_is_exact_enough():
    """At 5e9 iterations, where a float32 counter would have stopped."""
    progress = Progress(counter(2_500_000_001), 5_000_000_000)
    np.testing.assert_allclose(read_schedule("linear:1e-3")(progress.fraction), 0.5e-3, rtol=1e-6)
