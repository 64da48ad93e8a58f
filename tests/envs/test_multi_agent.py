"""Several agents in parallel environments: agents that leave early, statistics, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.nonfinite.failure import Failure
from msrl_jax.nonfinite.origin import find_origin
from msrl_jax.run.loop.guard import Finding
from tests.support.compiled import exchanges
from tests.support.leaving import Leaving
from tests.support.slow import slow_unless

TEAMS = {"first": (0,), "others": (1, 2)}


@pytest.fixture(scope="module")
def rollout():
    """Eight steps of an episode that ends with its last agent, and of one that is cut off after two steps."""

    def run(limit):
        venv = envs.VectorizedAgents(Leaving(limit=limit), 2, TEAMS)
        actions = np.random.default_rng(0).integers(0, 3, (8, 2, 3))

        def play(key):
            state, first = venv.reset(key)
            state, steps = jax.lax.scan(venv.step, state, jnp.asarray(actions, jnp.int32))
            state, metrics = venv.pop_episodes(state)
            return first, steps, state._replace(key=()), metrics

        return actions, jax.tree.map(np.asarray, jax.jit(play)(jax.random.key(0)))

    return {limit: run(limit) for limit in (1000, 2)}


@pytest.mark.parametrize("limit", [1000, 2])
def test_agents_that_leave_early_are_absent_until_their_episode_ends(rollout, limit):
    actions, (first, steps, state, metrics) = rollout[limit]
    assert isinstance(first, envs.MaskedObservation) and first.obs.shape == (2, 3, 2)
    assert first.action_mask.shape == (2, 3, 4) and first.action_mask.all()

    def mask(time, absent):
        return (np.arange(4) < 3) | (time % 2 == 0) | absent[:, None]

    leave, time, absent = np.array([1, 3, 2]), 0, np.zeros(3, bool)
    returns, lengths, episode, length = [], [], np.zeros((2, 3)), 0
    for t in range(8):
        time, length = time + 1, length + 1
        reward = np.where(absent, 0, actions[t] + 1)
        episode += reward
        np.testing.assert_array_equal(steps.reward[t], reward)
        np.testing.assert_array_equal(steps.valid[t], [~absent] * 2)
        gone = absent | (time == leave)
        np.testing.assert_array_equal(steps.terminated[t], [gone] * 2)
        truncated = time == limit
        ended = truncated or gone.all()
        assert (steps.truncated[t] == truncated).all() and (steps.ended[t] == ended).all()
        np.testing.assert_array_equal(steps.final_obs.obs[t, :, :, 0], np.full((2, 3), time))
        np.testing.assert_array_equal(steps.final_obs.action_mask[t, 0], mask(time, gone))
        np.testing.assert_array_equal(steps.final_state[t], np.tile(np.stack([[time] * 3, range(3)], 1).ravel(), (2, 1)))
        if ended:
            returns.append(episode)
            lengths += [length] * 2
            time, length, episode, gone = 0, 0, np.zeros((2, 3)), np.zeros(3, bool)
        absent = gone
        np.testing.assert_array_equal(steps.obs.obs[t, :, :, 0], np.full((2, 3), time))
        np.testing.assert_array_equal(steps.obs.action_mask[t, 1], mask(time, absent))
        np.testing.assert_array_equal(steps.state[t], np.tile(np.stack([[time] * 3, range(3)], 1).ravel(), (2, 1)))
    every = np.concatenate(returns)
    assert len(every) == {1000: 4, 2: 8}[limit]
    means = {"": every.sum(1), "/first": every[:, 0], "/others": every[:, 1:].sum(1)}
    for team, values in means.items():
        mean = metrics[f"episode_return{team}"]
        assert mean.total / mean.count == pytest.approx(values.mean())
    assert metrics["episode_length"].total / metrics["episode_length"].count == np.mean(lengths)
    assert not state.episodes.return_sum.any() and not state.episodes.num_episodes.any()
    np.testing.assert_array_equal(state.episodes.episode_return, episode)


def test_vectorize_tells_several_agents_from_one_by_their_names():
    venv = envs.vectorize(Leaving(), 4)
    assert isinstance(venv, envs.VectorizedAgents) and venv.agents == Leaving.agents and venv.state_size == 6
    state, obs = jax.eval_shape(venv.reset, jax.random.key(0))
    assert obs.obs.shape == (4, 3, 2) and obs.action_mask.shape == (4, 3, 4)
    state, step = jax.eval_shape(venv.step, state, jnp.zeros((4, 3), jnp.int32))
    assert step.reward.shape == step.terminated.shape == (4, 3) and step.reward.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"action of Leaving is int32\[4\]; it must be int32\[4, 3\]: .* agent of each env"):
        venv.step(state, jnp.zeros(4, jnp.int32))


@pytest.mark.slow
def test_splitting_the_environments_over_devices_costs_no_communication_and_changes_nothing():
    venv = envs.vectorize(Leaving(), 16)
    actions = jnp.asarray(np.random.default_rng(0).integers(0, 3, (8, 16, 3)), jnp.int32)

    def play(state, actions):
        state, steps = jax.lax.scan(venv.step, state, actions)
        return state._replace(key=()), steps

    state, _ = venv.reset(jax.random.key(0))
    mesh = Mesh(np.array(jax.devices()[:8]), ("env",))
    by_env, by_time_env = NamedSharding(mesh, P("env")), NamedSharding(mesh, P(None, "env"))
    split = jax.jit(play, in_shardings=(by_env, by_time_env), out_shardings=(by_env, by_time_env))
    program = split.lower(state, actions).compile()
    assert not exchanges(program)
    eight = program(jax.device_put(state, by_env), jax.device_put(actions, by_time_env))
    assert eight[1].reward.sharding.device_set == set(jax.devices()[:8]) and eight[1].ended.any()
    jax.tree.map(np.testing.assert_array_equal, eight, jax.jit(play)(state, actions))


def changed(**members):
    """A Leaving, some of whose members are replaced."""
    env = Leaving()
    for name, value in members.items():
        setattr(env, name, value)
    return env


def stepping(change):
    """A Leaving whose step returns something else."""
    env = Leaving()
    step = env.step
    env.step = lambda key, state, action: change(*step(key, state, action))
    return env


STEP = r"Leaving\.step"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (changed(agents=("one", "two")), r"observation of Leaving\.reset has a value of float32\[3, 2\], but .* its 2 agents"),
        (changed(agents=("one", "two", "one")), r"Leaving\.agents is \('one', 'two', 'one'\), which names an agent twice"),
        (changed(agents=()), r"Leaving\.agents is \(\); give a tuple with the name of every agent, at least one"),
        (stepping(lambda s, o, r, d, t: (s, o, r.sum(), d, t)), r"reward of " + STEP + r" is int32\[\]; return one number"),
        (stepping(lambda s, o, r, d, t: (s, o, {"one": r[0]}, d, t)), r"reward of " + STEP + r" is a dict; return one number"),
        (stepping(lambda s, o, r, d, t: (s, o, r, d.all(), t)), r"terminated of " + STEP + r" is bool\[\]; return one flag"),
        (stepping(lambda s, o, r, d, t: (s, o, r, d, d)), r"truncated of " + STEP + r" is bool\[3\]; return a scalar bool"),
        (changed(action_mask=lambda state: jnp.ones((3, 2), bool)), r"Leaving\.action_mask is bool\[3, 2\]; .*bool\[3, 4\]"),
        (changed(action_mask=lambda state: {"one": state}), r"Leaving\.action_mask is a dict; return bool\[3, 4\], whether"),
        (changed(action_space=envs.Box(-1, 1, ())), "only actions of a Discrete space can be illegal"),
        (changed(global_state=lambda state: state), r"Leaving\.global_state returned int32\[\]; return a vector"),
    ],
)
def test_an_environment_that_breaks_the_protocol_is_refused_with_the_field_named(env, message):
    with pytest.raises(TypeError, match=message):
        envs.vectorize(env, 2)


def test_an_incomplete_environment_is_refused():
    class Dicts:
        agents = ("one", "two")
        observation_spaces = action_spaces = reset = step = None

    with pytest.raises(TypeError, match=r"Dicts has no observation_space; .*stack_agents\(env\) makes them from dicts"):
        envs.vectorize(Dicts(), 2)  # type: ignore[arg-type]


class Faulty(Leaving):
    """Agent "two" has no legal action, or a reward or an observation of nan, when its environment is at time 2."""

    def __init__(self, kind):
        super().__init__(leave=(9, 9, 9))
        self.kind = kind

    def step(self, key, state, action):
        state, obs, reward, terminated, truncated = super().step(key, state, action)
        bad = jnp.sqrt(jnp.where(state == 2, -1.0, 1.0)) - 1
        obs = obs.at[1, 0].add(bad) if self.kind == "obs" else obs
        reward = reward.astype(jnp.float32)
        return state, obs, reward.at[1].add(bad) if self.kind == "reward" else reward, terminated, truncated

    def action_mask(self, state):
        legal = super().action_mask(state)
        return legal.at[1].set(legal[1] & (state != 2)) if self.kind == "mask" else legal

    def global_state(self, state):
        return state[None]


@pytest.mark.parametrize(
    ("kind", "action", "message", "teams"),
    [
        ("reward", 0, "environment 1, for agent 'two', returned a reward of nan: ", {"first": (0, 2), "second": (1,)}),
        slow_unless(False, "obs", 0, "environment 1, for agent 'two', returned an observation of nan: ", {}),
        slow_unless(False, "mask", 0, "environment 1, for agent 'two', returned an observation without a legal action: ", {}),
        ("", 3, "environment 1, for agent 'two', was given an illegal action: ", {}),
    ],
)
def test_the_agent_of_a_fault_is_named(kind, action, message, teams):
    venv = envs.vectorize_agents(Faulty(kind), 2, teams)

    @msrl.fragment(role="env")
    def env_step(state, action):
        state, t = venv.step(state, action)
        seen = {"reward": t.reward, "final_obs": t.final_obs}
        parts = {team: jax.tree.map(lambda x, m=members: x[:, jnp.array(m)], seen) for team, members in venv.teams.items()}
        return state.env_state, parts or t

    state = venv.reset(jax.random.key(0))[0]._replace(env_state=jnp.array([5, 1]))
    actions = jnp.zeros((2, 3), jnp.int32).at[1, 1].set(action)
    closed = jax.make_jaxpr(env_step)(state, actions)
    values = dict(zip(closed.jaxpr.invars, jax.tree.leaves((state, actions)), strict=True))
    values |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    origin = find_origin(closed.jaxpr.eqns, values, closed.jaxpr.outvars)
    failure = Failure.from_origin(origin, 1, False, venv)  # type: ignore[arg-type]
    assert str(failure).startswith(message)
    said = Finding("loss", None, 1, None, failure).describe(0)
    assert said.startswith(message) and said.endswith(". So 'loss' is not finite")


def test_vector_environments_with_teams_can_be_keys():
    env = Leaving()
    one, two = envs.vectorize_agents(env, 2, TEAMS), envs.vectorize_agents(env, 2, dict(TEAMS))
    assert one == two and len({one, two}) == 1 and one != envs.vectorize_agents(env, 2)


def test_an_environment_may_make_its_own_copies():
    class Own(Leaving):
        def vectorize(self, num_envs, teams=None):
            return envs.VectorizedAgents(Leaving(), num_envs + 1, teams or {})

    assert envs.vectorize_agents(Own(), 2, TEAMS).teams == TEAMS  # type: ignore[arg-type]
    assert envs.vectorize_agents(Own(), 2).num_envs == envs.vectorize(Own(), 2).num_envs == 3  # type: ignore[arg-type]
