"""Values of teams: updates of VDN, QMIX and MADDPG, and MAPPO's advantages, against the papers' formulas in NumPy and float64.

References take gradients by central differences. Our gradients are read from Adam's first moments after one update.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import algorithms, replay
from msrl_jax.algorithms import Progress, ippo, maddpg, qmix
from msrl_jax.envs import Box, JointObservation, MaskedObservation, VectorizedAgents
from msrl_jax.fragments.counters import counter
from msrl_jax.loops.teams import Experience, Now
from tests.support.leaving import Leaving
from tests.support.mixers import plain_monotonic
from tests.support.slow import slow_unless

A, N, OBS, STATE, DISCOUNT = 3, 4, 2, 6, 0.9
SMALL = {
    "num_envs": 4,
    "unroll_length": 4,
    "hidden_sizes": (5,),
    "learning_rate": 1e-3,
    "discount": DISCOUNT,
    "max_grad_norm": 1e6,
    "replay.capacity": 256,
    "replay.learning_starts": None,
    "num_updates": 1,
}
NOWHERE = replay.Indices(*np.zeros((2, 1), np.int32))


class Continuous(Leaving):
    """The same shapes with continuous actions of two components."""

    action_space = Box(-1.0, 1.0, (2,))
    action_mask = None

    def step(self, key, state, action):
        state, obs, _, *ends = super().step(key, state, jnp.zeros(A, jnp.int32))
        return state, obs, jnp.ones(A), *ends


def learning(module, env, config, seed):
    """A team with parameters far from those at the start, its state, and `updated`: what it learns from one given batch.

    `updated(state, experience, weight)` returns gradients, TD errors and statistics. The batch takes the place of the one that
    the team draws.
    """
    agent = config.build(env)

    def learn(state, experience, weight):
        sample = replay.Sample(*jax.tree.map(lambda x: x[None], (experience, NOWHERE, weight, weight)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "draw", lambda buffer, held, key, *_: (key, sample, jnp.bool(True), {}))
            return agent.iteration(state, Progress(counter()))

    compiled = jax.jit(learn)

    def updated(state, experience, weight):
        after, metrics = jax.device_get(compiled(state, experience, weight))
        team = after.teams["agents"]
        opt_state = team.opt_state if isinstance(team.opt_state, dict) else {"": team.opt_state}
        moments = {name: jax.tree.map(lambda m: m / (1 - 0.9), part[1][0].mu) for name, part in opt_state.items()}
        stats = {name: x.total for name, x in metrics.items() if hasattr(x, "total") and "loss" in name}
        return moments.get("", moments), team.pending.td_error[0], stats

    state, rng = jax.jit(agent.init)(jax.random.key(seed)), np.random.default_rng(seed)
    far = lambda tree: jax.tree.map(lambda x: x + np.float32(0.4 * rng.normal(size=x.shape)), tree)
    team = state.teams["agents"]
    team = team._replace(target_params=far(team.target_params))
    return state._replace(params=far(state.params), teams={"agents": team}), updated


def wide(tree):
    return jax.tree.map(lambda x: np.array(x, np.float64), tree)


def slope(loss, params):
    """The gradient of a function of arrays by central differences."""
    params = wide(params)
    leaves = jax.tree.leaves(params)
    grads = [np.zeros_like(x) for x in leaves]
    for x, grad in zip(leaves, grads, strict=True):
        for i in np.ndindex(*x.shape):
            value = x[i]
            x[i] = value + 1e-5
            above = loss(params)
            x[i] = value - 1e-5
            grad[i] = (above - loss(params)) / 2e-5
            x[i] = value
    return jax.tree.unflatten(jax.tree.structure(params), grads)


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), got, want)


def joint_observation(rng, *shape, masked=True, absent=0.3):
    obs = np.float32(rng.normal(size=(*shape, A, OBS)))
    mask = rng.uniform(size=(*shape, A, N)) < 0.6
    mask[..., 0] |= ~mask.any(-1)
    state = np.float32(rng.normal(size=(*shape, STATE)))
    return JointObservation(MaskedObservation(obs, mask) if masked else obs, state, rng.uniform(size=(*shape, A)) >= absent)


def legal(rng, mask):
    """Random legal actions."""
    return np.int32(np.argmax(np.where(mask, rng.uniform(size=mask.shape), -1), -1))


def garbled(rng, e):
    """The same experience with other observations, legal actions, actions and rewards of agents that are absent."""

    def swap(valid, x):
        other = rng.permuted(x.reshape(-1)).reshape(x.shape) if x.dtype == bool else np.asarray(7 * x + 1, x.dtype)
        return np.where(valid.reshape(*valid.shape, *[1] * (x.ndim - valid.ndim)), x, other)

    def swapped(obs):
        return obs._replace(obs=jax.tree.map(lambda x: swap(obs.valid, x), obs.obs))

    action = swap(e.obs.valid, e.action)
    return e._replace(
        obs=swapped(e.obs),
        next_obs=swapped(e.next_obs),
        action=action % N if action.dtype == np.int32 else action,
        reward=swap(e.obs.valid, e.reward) if e.reward.ndim == e.obs.valid.ndim else e.reward,
    )


def mlp(params, x):
    """Networks of one hidden layer of ReLUs, with the parameters that flax names in the order of the calls."""
    layers = params["params"]
    hidden, head = layers["torso"]["Dense_0"], layers.get("head", layers.get("Dense_0"))
    return np.maximum(x @ hidden["kernel"] + hidden["bias"], 0) @ head["kernel"] + head["bias"]


def of_agent(params, i):
    return jax.tree.map(lambda x: x[i], params)


def with_id(x, i):
    return np.concatenate([x, np.broadcast_to(np.eye(A)[i], (*x.shape[:-1], A))], -1)


def per_agent(params, inputs, shared):
    """Outputs `[..., A, D]` of the networks of agents, which share one or have their own; `inputs(i)` is what agent i sees."""
    outputs = [mlp(params if shared else of_agent(params, i), with_id(inputs(i), i) if shared else inputs(i)) for i in range(A)]
    return np.stack(outputs, -2)


# Values of joint actions.

S, B, STEPS = 5, 4, 2
VALUES = {"core": None, "trace_length": S - STEPS + 1, "replay.n_step": STEPS, "batch_size": B}


def window(rng, masked=True):
    """Windows in which agents leave: they stay absent until the episode ends."""
    ends = rng.uniform(size=(S, B)) < 0.3
    terminated = ends & (rng.uniform(size=(S, B)) < 0.5)
    obs, next_obs = (joint_observation(rng, S, B, masked=masked) for _ in range(2))

    def before_reset(after, begun):  # within an episode, what follows is the next step's
        ended = ends[:-1].reshape(S - 1, B, *[1] * (begun.ndim - 2))
        return np.concatenate([np.where(ended, after[:-1], begun[1:]), after[-1:]])

    next_obs = jax.tree.map(before_reset, next_obs, obs)
    reward = np.float32(rng.normal(size=(S, B)))
    return replay.Transition(obs, legal(rng, obs.obs.action_mask), reward, terminated, ends & ~terminated, next_obs)


def joint_value(params, values, obs, mixer):
    """The values of joint actions, from those of the agents that are present."""
    values = np.where(obs.valid, values, 0.0)
    if mixer == "sum":
        return values.sum(-1)
    return plain_monotonic(params["mixer"], values.reshape(-1, A), obs.state.reshape(-1, STATE), 2).reshape(values.shape[:-1])


@pytest.mark.parametrize(
    ("name", "mixer", "shared"), [("qmix", "monotonic", True), pytest.param("vdn", "sum", False, marks=pytest.mark.slow)]
)
@pytest.mark.long
def test_one_update_of_joint_values_equals_the_formulas(name, mixer, shared):
    """Double Q-learning with the joint values (arXiv 1803.11485, eq. 6; 1706.05296, eq. 2), two rewards a target."""
    sizes = {"mixing_size": 2, "hyper_size": 3} if mixer == "monotonic" else {}
    config = algorithms.make(name, SMALL | VALUES | sizes | {"share_parameters": shared})
    state, updated = learning(qmix, Leaving(), config, 1)
    rng = np.random.default_rng(3)
    w, weight = window(rng), np.float32(rng.uniform(0.5, 1, B))
    got, error, stats = updated(state, w, weight)

    online, target = wide(state.params["agents"]), wide(state.teams["agents"].target_params)
    values = lambda params, obs: per_agent(params["agents"], lambda i: np.float64(obs.obs.obs[..., i, :]), shared)
    taken = lambda values, action: np.take_along_axis(values, action[..., None], -1)[..., 0]
    best = np.where(w.next_obs.obs.action_mask, values(online, w.next_obs), -np.inf).argmax(-1)
    next_value = joint_value(target, taken(values(target, w.next_obs), best), w.next_obs, mixer)
    goal = np.zeros((S - STEPS + 1, B))
    for t, b in np.ndindex(*goal.shape):
        factor = 1.0
        for k in range(t, t + STEPS):
            goal[t, b] += factor * w.reward[k, b]
            factor *= 0.0 if w.terminated[k, b] else DISCOUNT
            if w.terminated[k, b] or w.truncated[k, b] or k == t + STEPS - 1:
                goal[t, b] += factor * next_value[k, b]
                break

    def loss(params):
        value = joint_value(params, taken(values(params, w.obs), w.action), w.obs, mixer)[: len(goal)]
        return (weight * (0.5 * (value - goal) ** 2).mean(0)).mean()

    difference = np.abs(goal - joint_value(online, taken(values(online, w.obs), w.action), w.obs, mixer)[: len(goal)])
    np.testing.assert_allclose(error, 0.9 * difference.max(0) + 0.1 * difference.mean(0), rtol=1e-4)
    np.testing.assert_allclose(stats["loss"], (0.5 * difference**2).mean(), rtol=1e-4)
    assert_close(got, slope(loss, online))
    jax.tree.map(np.testing.assert_array_equal, updated(state, garbled(rng, w), weight), (got, error, stats))


# MADDPG.


def transitions(rng, rows, masked):
    obs, next_obs = (joint_observation(rng, rows, masked=masked) for _ in range(2))
    action = legal(rng, obs.obs.action_mask) if masked else np.float32(rng.uniform(-1, 1, (rows, A, 2)))
    reward = np.float32(rng.normal(size=(rows, A)))
    discount = np.float32(np.where(next_obs.valid, DISCOUNT, 0.0))
    return replay.NStep(obs, action, reward, discount, next_obs)


def agents_mean(x, valid, shared):
    """The mean over the examples that count; if every agent has its own network, the sum of the agents' means."""
    if shared:
        return x[valid].mean()
    return sum(x[:, i][valid[:, i]].mean() for i in range(A))


@pytest.mark.long
@pytest.mark.parametrize(("env", "shared"), [(Leaving(), True), slow_unless(False, Continuous(), False)])
def test_one_update_of_maddpg_equals_the_formulas(env, shared):
    """The critics' targets and loss (arXiv 1706.02275, eq. 6), and the policy gradient at the replayed actions (eq. 5)."""
    discrete, rows, penalty, temperature = isinstance(env, Leaving) and env.action_mask is not None, 6, 0.02, 0.7
    size = N if discrete else 2
    options = {"output_penalty": penalty, "temperature": temperature, "share_parameters": shared, "batch_size": rows}
    config = algorithms.make(algorithms.MADDPG, SMALL | options)
    state, updated = learning(maddpg, env, config, 4)
    rng = np.random.default_rng(7)
    e, weight = transitions(rng, rows, discrete), np.float32(rng.uniform(0.5, 1, rows))
    got, error, stats = updated(state, e, weight)

    team = state.teams["agents"]
    online, target, valid = wide(state.params["agents"]), wide(team.target_params), e.obs.valid
    key = jax.random.split(team.key)[1]  # of the one update
    keys = jax.vmap(lambda key: jax.random.split(key, rows))(jax.random.split(key))
    noises = np.asarray(jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (A, N))))(keys))
    features = lambda obs: np.float64(obs.obs.obs if discrete else obs.obs)

    def output(actors, obs):
        return per_agent(actors, lambda i: features(obs)[:, i], shared)

    def perturbed(actors, obs, noise):
        """Logits with noise, -inf for illegal actions."""
        return np.where(obs.obs.action_mask, output(actors, obs), -np.inf) + np.float64(noise)

    def act(actors, obs, noise):
        return np.eye(N)[perturbed(actors, obs, noise).argmax(-1)] if discrete else np.tanh(output(actors, obs))

    def q(critics, obs, joint_of):
        """Values `[rows, A]`; the critic of agent i sees `joint_of(i)` `[rows, A, size]`, of the present agents."""
        seen = lambda i: np.concatenate(
            [with_id(np.float64(obs.state), i) if shared else np.float64(obs.state)]
            + [np.where(obs.valid[:, j, None], joint_of(i)[:, j], 0.0) for j in range(A)],
            -1,
        )
        return np.stack([mlp(critics if shared else of_agent(critics, i), seen(i))[:, 0] for i in range(A)], -1)

    next_action = act(target["actor"], e.next_obs, noises[0])
    goal = e.reward + e.discount * q(target["critic"], e.next_obs, lambda i: next_action)
    taken = np.eye(N)[e.action] if discrete else np.float64(e.action)

    def critic_loss(critics):
        return agents_mean(weight[:, None] * 0.5 * (q(critics, e.obs, lambda i: taken) - goal) ** 2, valid, shared)

    def replaced(own):
        """For agent i: the replayed actions, but its own one from `own` `[rows, A, size]`."""
        return lambda i: np.where((np.arange(A) == i)[:, None], own, taken)

    now = act(online["actor"], e.obs, noises[1])
    # The gradient of every agent's critic by the agent's own action, at the new action.
    gradient = np.zeros((rows, A, size))
    for n in range(size):
        step = 1e-5 * np.eye(size)[n]
        above, below = (q(online["critic"], e.obs, replaced(now + sign * step)) for sign in (1, -1))
        gradient[..., n] = (above - below) / 2e-5

    def actor_loss(actors):
        """Linear in the action or its relaxation, with the slope of the critic."""
        if discrete:
            logits = perturbed(actors, e.obs, noises[1]) / temperature
            action = np.exp(logits - logits.max(-1, keepdims=True))
            action /= action.sum(-1, keepdims=True)
        else:
            action = np.tanh(output(actors, e.obs))
        return agents_mean(penalty * (output(actors, e.obs) ** 2).mean(-1) - (gradient * action).sum(-1), valid, shared)

    difference = np.where(valid, np.abs(goal - q(online["critic"], e.obs, lambda i: taken)), 0.0)
    np.testing.assert_allclose(error, difference.sum(-1) / np.maximum(valid.sum(-1), 1), rtol=1e-4, atol=1e-6)
    value = q(online["critic"], e.obs, replaced(now)) - penalty * (output(online["actor"], e.obs) ** 2).mean(-1)
    np.testing.assert_allclose(stats["actor_loss"], -value[valid].mean(), rtol=1e-4)
    assert_close(got["critic"], slope(critic_loss, online["critic"]))
    assert_close(got["actor"], slope(actor_loss, online["actor"]))
    jax.tree.map(np.testing.assert_array_equal, updated(state, garbled(rng, e), weight), (got, error, stats))


# Advantages with a central critic.


@pytest.mark.long
def test_advantages_of_mappo_equal_a_loop_over_every_agent():
    """Generalized advantages (arXiv 1506.02438, eq. 16) of agents that end at different times, from the critic's values."""
    length, num_envs, gae_lambda = 6, 2, 0.8
    config = algorithms.MAPPO(
        num_envs=num_envs,
        unroll_length=length,
        num_epochs=1,
        num_minibatches=1,
        hidden_sizes=(5,),
        activation="relu",
        discount=DISCOUNT,
        gae_lambda=gae_lambda,
        normalize_advantage="none",
    )
    env, rng = Leaving(), np.random.default_rng(11)

    def as_statistics(config, policy, value, taken, advantage, old_value, target):
        """A loss that reports what it is given, number by number; for what does not count, nan."""
        told = {"action": taken.action[0, : A * length : A] * 1.0, "target": jnp.where(taken.valid, target, jnp.nan)[0]}
        told["difference"] = jnp.where(taken.valid, target - advantage, jnp.nan)[0, :: A * length]
        numbered = {f"{name}{i}": x[i] for name, x in told.items() for i in range(len(x))}
        return value.sum(), numbered | {"approx_kl": jnp.float32(0)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ippo, "ppo_loss", as_statistics)
        team = config.build_team(VectorizedAgents(env, num_envs), A)
        params, rest = jax.jit(team.init)(*jax.random.split(jax.random.key(1), 3))
        shape = (length, num_envs)
        now, final = joint_observation(rng, length + 1, num_envs, absent=0), joint_observation(rng, *shape, absent=0)
        valid, terminated = np.ones((*shape, A), bool), rng.uniform(size=(*shape, A)) < 0.3
        truncated = rng.uniform(size=shape) < 0.15
        for t in range(length):
            if t:
                ended = truncated[t - 1] | terminated[t - 1].all(-1)
                valid[t] = ended[:, None] | ~terminated[t - 1]
            terminated[t] |= ~valid[t]
        reward = np.where(valid, np.float32(rng.normal(size=(*shape, A))), np.float32(0))
        time = np.broadcast_to(np.arange(length, dtype=np.int32)[:, None, None], (*shape, A))  # as actions, to find steps again
        experience = Experience(
            jax.tree.map(lambda x: x[:-1], now.obs),
            now.state[:-1],
            np.zeros(shape, bool),
            time,
            (np.zeros((*shape, A), np.float32), (), ((), ())),
            reward,
            terminated,
            truncated,
            valid,
            final.obs,
            final.state,
        )
        after = Now(jax.tree.map(lambda x: x[-1], now.obs), now.state[-1], np.zeros(num_envs, bool))
        metrics = jax.jit(team.learn)(params, rest, experience, after, team.initial_carry(num_envs), Progress(counter()))[2]

    critic = wide(params["critic"])
    value = lambda state: np.stack([mlp(critic, with_id(np.float64(state), i))[..., 0] for i in range(A)], -1)
    here, bootstrap = value(now.state), value(final.state)
    want = np.zeros((*shape, A))
    for e, a in np.ndindex(num_envs, A):
        total = 0.0
        for t in reversed(range(length)):
            if terminated[t, e, a]:
                total = reward[t, e, a] - here[t, e, a]
            elif truncated[t, e]:
                total = reward[t, e, a] + DISCOUNT * bootstrap[t, e, a] - here[t, e, a]
            else:
                delta = reward[t, e, a] + DISCOUNT * here[t + 1, e, a] - here[t, e, a]
                total = delta + DISCOUNT * gae_lambda * total
            want[t, e, a] = total

    def told(name, size):
        return np.array([metrics[f"{name}{i}"] for i in range(size)])

    # The rows of the loss are ordered by environment, then by shuffled times.
    order = told("action", length).astype(int)
    target = told("target", length * num_envs * A).reshape(num_envs, length, A).swapaxes(0, 1)
    assert sorted(order) == list(range(length)) and (~valid).any() and truncated.any()
    expected = np.where(valid, want + here[:-1], np.nan)[order]
    np.testing.assert_allclose(target, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(told("difference", num_envs), np.where(valid, here[:-1], np.nan)[order[0], :, 0], rtol=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "fields", "message"),
    [
        ("vdn", {"mixing_size": 8}, r"VDN\.mixing_size has no effect with mixer='sum'; leave it out"),
        ("qmix", {"core": None, "burn_in": 4}, r"QMIX\.burn_in has no effect without a core; leave it out"),
        ("qmix", {"share_parameters": False, "agent_ids": False}, r"QMIX\.agent_ids has no effect with share_parameters=False"),
        ("ippo", {"share_parameters": False, "agent_ids": True}, r"IPPO\.agent_ids has no effect with share_parameters=False"),
    ],
)
def test_fields_without_effect_are_refused(algorithm, fields, message):
    with pytest.raises(ValueError, match=message):
        algorithms.make(algorithm, fields)
