"""Training with simulators on the host: the run is the one with the same environment on devices, under every policy."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.algorithms import ES
from msrl_jax.envs import Box, Discrete
from msrl_jax.envs.host_simulators import HostStep, HostVectorized, Stepping
from msrl_jax.fragments.passes.instructions import HostCall, walk
from tests.support.agents import make_counted
from tests.support.slow import slow_unless

LIMIT, LENGTH = 4, 12  # in eighths, which floats hold exactly
SPACE = Box(-2.0, 2.0, (2,))


def walked(xp, position, count, action):
    """One step of a walk on eighths: position, steps, reward, terminated, truncated."""
    eighths = xp.round(action * 4) / 8 if action.dtype == np.float32 else (2 * action - 1) / 8
    position = (position + eighths).astype(np.float32)
    count = count + 1
    terminated = abs(position) * 8 >= LIMIT
    return position, count, position * 2, terminated, (count >= LENGTH) & ~terminated


class WalkState(NamedTuple):
    position: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class OnDevice:
    action_space: object
    observation_space = SPACE
    name = "Walk"

    def reset(self, key):
        state = WalkState(jnp.float32(0), jnp.int32(0))
        return state, jnp.zeros(2)

    def step(self, key, state, action):
        position, count, *outcome = walked(jnp, state.position, state.count, action.reshape(()))
        return WalkState(position, count), jnp.stack([position, count / 16]), *outcome


class Walks:
    """The same environments on the host; `absent(step)` says which do not answer."""

    def __init__(self, num_envs, absent=None):
        self.position, self.count = np.zeros(num_envs, np.float32), np.zeros(num_envs, np.int32)
        self.absent, self.steps = absent, np.zeros(num_envs, np.int64)

    def obs(self):
        return np.stack([self.position, (self.count / 16).astype(np.float32)], -1)

    def reset(self, envs, seeds):
        self.position[envs], self.count[envs] = 0, 0
        return self.obs()[envs]

    def start(self, action):
        def finish():
            moved = walked(np, self.position, self.count, action.reshape(-1))
            self.position, self.count, reward, terminated, truncated = moved
            envs = np.arange(len(self.count))
            final_obs, valid = self.obs(), np.ones(len(envs), bool)
            if self.absent is not None:
                valid = ~self.absent(envs, self.steps)
                reward, terminated, truncated = np.where(valid, reward, 0), terminated & valid, truncated | ~valid
            self.steps += 1
            self.reset(envs[terminated | truncated], None)
            return HostStep(self.obs(), reward.astype(np.float32), terminated, truncated, final_obs, valid)

        return finish


@dataclasses.dataclass(frozen=True)
class OnHost:
    action_space: object
    absent: object = None
    observation_space = SPACE
    name, on_host = "Walk", True

    def vectorize(self, num_envs):
        make = functools.partial(Walks, num_envs, self.absent)
        return HostVectorized(self, num_envs, Stepping(make, num_envs))


INTEGERS, FLOATS = Discrete(2), Box(-1.0, 1.0, (1,))
SMALL = {"num_envs": 16, "unroll_length": 8, "hidden_sizes": (8,)}
REPLAY = {"replay.learning_starts": 128, "batch_size": 32, "num_updates": 2, "replay.capacity": 512}
CASES = {
    "ppo": (INTEGERS, {"num_minibatches": 2, "num_epochs": 2, "normalize_observations": True}),
    "a2c": (INTEGERS, {}),
    "a3c": (INTEGERS, {"num_workers": 4}),
    "impala": (INTEGERS, {}),
    "recurrent_ppo": (INTEGERS, {"num_minibatches": 2, "num_epochs": 2, "core.size": 8}),
    "pqn": (INTEGERS, {"num_minibatches": 2, "num_epochs": 2}),
    "dqn": (INTEGERS, REPLAY | {"replay.n_step": 2}),
    "r2d2": (INTEGERS, REPLAY | {"core.size": 8, "burn_in": 2, "trace_length": 4, "replay.learning_starts": 256}),
    "muzero": (INTEGERS, REPLAY | {"num_simulations": 4, "model_steps": 2, "replay.n_step": 2, "latent_size": 8}),
    "sac": (FLOATS, REPLAY),
    "td3": (FLOATS, REPLAY),
    "td3+gru": (FLOATS, REPLAY | {"core": "gru:8", "burn_in": 2, "trace_length": 4, "replay.learning_starts": 256}),
}
OFTEN = {"ppo": ("Central",)}
ITERATIONS = 4


def build(name, kind):
    space, options = CASES[name]
    return make_counted(name.partition("+")[0], kind(space), **SMALL | options)


@functools.cache
def reference(name):
    """Parameters and metrics of the run on devices, under plain `jax.jit`."""
    agent = build(name, OnDevice)
    state = jax.jit(agent.init)(jax.random.key(0))
    after, metrics = jax.jit(lambda s: jax.lax.scan(lambda s, _: agent.iteration(s), s, length=ITERATIONS))(state)
    return jax.device_get((after.inner.params, after.inner.obs, metrics))


POLICIES = [name for name in msrl.policies.names() if name != "GPUOnly"]
MATRIX = [  # on one device under one policy each
    slow_unless(policy in OFTEN.get(name, ()) and devices == 4, name, devices, policy)
    for i, name in enumerate(CASES)
    for devices in (1, 4)
    for k, policy in enumerate(POLICIES)
    if devices == 4 or k == i % len(POLICIES)
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "devices", "policy"), MATRIX)
def test_the_run_with_simulators_on_the_host_is_the_run_on_devices(name, devices, policy):
    agent = build(name, OnHost)
    program = msrl.compile(
        agent.iteration,
        jax.eval_shape(agent.init, jax.random.key(0)),
        policy=msrl.policies.get(policy),
        axes=agent.axes,
        groups={"env": agent.env_group},
        devices=jax.devices()[:devices],
    )
    calls = sum(times for i, times in walk(program.instructions) if isinstance(i, HostCall))
    assert calls == SMALL["unroll_length"]
    after, metrics = program.run(program.initialize(agent.init, jax.random.key(0)), ITERATIONS)
    after, (params, obs, wanted) = after.inner, reference(name)
    np.testing.assert_allclose(after.obs, obs, rtol=0, atol=1e-5)
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert float(metrics.pop("absent").total.sum()) == 0
    assert metrics.keys() == wanted.keys()
    for a, b in zip(jax.tree.leaves(metrics), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def of_third_env(envs, steps):
    """The third environment does not answer two steps of every seven."""
    return (envs == 3) & (steps % 7 < 2)


class Trouble:
    """What goes wrong now: whether steps get no answer, and the noise that such steps hold."""

    happens, noise = True, 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_steps_without_an_answer_are_not_learned_from(name):
    """Whatever such steps hold, the parameters are the same."""
    trouble = Trouble()
    agent = build(name, functools.partial(Noisy, trouble=trouble))
    init, iteration = jax.jit(agent.init), jax.jit(agent.iteration)

    def run(happens, noise):
        trouble.happens, trouble.noise = happens, noise
        state = init(jax.random.key(0))
        for _ in range(3):
            state, metrics = iteration(state)
        return jax.device_get((state.inner.params, metrics["absent"]))

    (params, absent), (others, _), (without, none) = run(True, 0.0), run(True, 3.0), run(False, 0.0)
    assert 0 < absent.total < absent.count / 8 and none.total == 0
    jax.tree.map(np.testing.assert_array_equal, params, others)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(without), strict=True))


class Noisy(OnHost):
    """Rewards and last observations of the steps without an answer are noise."""

    def __init__(self, action_space, trouble):
        super().__init__(action_space)
        object.__setattr__(self, "trouble", trouble)

    def vectorize(self, num_envs):
        trouble = self.trouble

        class NoisyWalks(Walks):
            def reset(self, envs, seeds):
                if seeds is not None:  # a run begins
                    self.steps[envs] = 0
                return super().reset(envs, seeds)

            def start(self, action):
                finish = super().start(action)

                def noisy():
                    t, noise = finish(), trouble.noise
                    t.reward[~t.valid], t.final_obs[~t.valid] = noise, t.final_obs[~t.valid] + noise
                    return t

                return noisy

        absent = lambda envs, steps: trouble.happens & of_third_env(envs, steps)
        make = functools.partial(NoisyWalks, num_envs, absent)
        return HostVectorized(self, num_envs, Stepping(make, num_envs))


def test_es_refuses_simulators_on_the_host():
    with pytest.raises(TypeError, match=r"es resets all environments .* simulators on the host \(Walk\) reset only when"):
        ES().build(OnHost(INTEGERS))
