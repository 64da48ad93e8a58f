"""Learning from data alone: updates against implementations written out here, and no environment in the loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, data, replay
from msrl_jax.algorithms import Progress, counted
from msrl_jax.algorithms.iql import Exponential, OfPolicy
from msrl_jax.fragments.counters import counter, to_float
from msrl_jax.loops.offline import learn_from
from tests.support.off_policy import (
    adam,
    assert_close,
    counting,
    one,
    plain_losses,
    plain_mlp,
    plain_policy,
    plain_q,
    plain_soft_value,
    wide,
)
from tests.support.random_walk import RandomWalk
from tests.support.transitions import noise

B, S, LENGTH = 32, 3, 4
SMALL = {"num_updates": 1, "batch_size": B, "hidden_sizes": (8, 6), "learning_rate": 3e-3}
LEFT = 1 - 4 / 10  # of the learning rate, when an update is compared


def make(name, continuous, **options):
    """The agent, its config and its data."""
    env = RandomWalk(continuous)
    dataset = noise(env, length=LENGTH)
    config = algorithms.make(name, SMALL | options | {"data": dataset})
    return config.build(env), config, dataset


def two_states(agent, iterations=4):
    """The state after some iterations of 10, that after one more, and what this one measured."""
    iterate, state = counting(agent, 10), agent.with_data(jax.jit(agent.init)(jax.random.key(0)))
    for i in range(iterations):
        state, _ = iterate(state, i)
    return state, *iterate(state, iterations)


def drawn(config, dataset, state):
    """The batch that an iteration learned from, in the learner's units and in those of the environment, and its key."""
    discount = getattr(config, "discount", 1.0)
    buffer, held = data.buffer(dataset.split(0.1)[0], batch_size=B, discount=discount, shards=8)
    key = jax.random.split(state.data_key, 3)[2]
    training = state.data.training
    if dataset.action.ndim == 1:
        held = held._replace(items=[jnp.int32(x) if i == 1 else x for i, x in enumerate(held.items)])
    batch, raw = (jax.tree.map(np.asarray, buffer.sample(s, key).experience) for s in (training, held))
    return batch, raw, jax.random.split(state.key, 3)[2]


def plain_likelihood(params, batch, continuous):
    """Log-likelihoods in the plain formulas."""
    outputs = plain_mlp(params, batch.obs)
    if not continuous:
        return outputs[np.arange(B), batch.action] - jnp.log(jnp.exp(outputs).sum(-1))
    action = np.clip(batch.action, -0.999, 0.999)
    loc, scale = outputs[:, :2], jnp.exp(outputs[:, 2:])
    density = jnp.exp(-(((np.arctanh(action) - loc) / scale) ** 2) / 2) / (scale * np.sqrt(2 * np.pi))
    return (jnp.log(density) - np.log(1 - action**2)).sum(-1)


def plain_critic(critic, i, batch, continuous):
    inputs = jnp.concatenate([batch.obs, batch.action], -1) if continuous else batch.obs
    q = plain_mlp(one(critic, i), inputs)
    return q[:, 0] if continuous else q[np.arange(B), batch.action]


def assert_updated(state, after, config, losses, metrics=None):
    """That each part of the parameters took a step of Adam along the gradient of its loss."""
    for name, loss in losses.items():
        value, gradient = jax.jit(jax.value_and_grad(loss))(state.params[name])
        assert_close(after.params[name], adam(state.params[name], state.opt_state[name], gradient, config, LEFT))
        if metrics is not None and f"{name}_loss" in metrics:
            np.testing.assert_allclose(metrics[f"{name}_loss"], value, rtol=1e-4, atol=1e-5)


BOTH = pytest.mark.parametrize(
    "continuous", [pytest.param(True, id="continuous"), pytest.param(False, id="discrete", marks=pytest.mark.slow)]
)


@BOTH
def test_an_update_of_bc_equals_an_independent_implementation(continuous):
    agent, config, dataset = make("bc", continuous)
    state, after, metrics = two_states(agent)
    batch, raw, _ = drawn(config, dataset, state)
    if continuous:
        np.testing.assert_allclose(batch.action, (raw.action - np.array([0, 0.5])) / 0.5, atol=1e-6)
    loss = lambda params: -plain_likelihood(params, batch, continuous).mean()
    value, gradient = jax.jit(jax.value_and_grad(loss))(state.params)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert_close(after.params, adam(state.params, state.opt_state, gradient, config, LEFT))


@pytest.mark.long
@BOTH
def test_an_update_of_iql_equals_an_independent_implementation(continuous):
    agent, config, dataset = make("iql", continuous, max_grad_norm=0.7, weighting=Exponential(max_weight=1.5))
    state, after, metrics = two_states(agent)
    batch, raw, _ = drawn(config, dataset, state)
    returns = np.add.reduceat(dataset.reward, np.arange(0, len(dataset), LENGTH))
    np.testing.assert_allclose(batch.reward, raw.reward / ((returns.max() - returns.min()) / LENGTH), rtol=1e-4)
    assert set(np.unique(batch.discount)) == {0, np.float32(0.99)}
    value = lambda params, obs: plain_mlp(params, obs)[:, 0]

    @jax.jit
    def constants(params, target_critic):
        outcome = jnp.minimum(*(plain_critic(target_critic, i, batch, continuous) for i in range(2)))
        target = batch.reward + batch.discount * value(params["value"], batch.next_obs)
        return outcome, target, jnp.minimum(jnp.exp(3 * (outcome - value(params["value"], batch.obs))), 1.5)

    outcome, target, weight = constants(state.params, state.target_params)
    assert weight.max() == 1.5 > weight.min()

    def value_loss(params):
        error = outcome - value(params, batch.obs)
        return (jnp.where(error > 0, 0.7, 0.3) * error**2).mean()

    losses = {
        "actor": lambda params: -(weight * plain_likelihood(params, batch, continuous)).mean(),
        "critic": lambda params: sum(((plain_critic(params, i, batch, continuous) - target) ** 2).mean() / 2 for i in range(2)),
        "value": value_loss,
    }
    assert_updated(state, after, config, losses, metrics)
    moved = jax.tree.map(lambda old, new: 0.995 * old + 0.005 * new, wide(state.target_params), wide(after.params["critic"]))
    assert_close(after.target_params, moved)


CRR = {"weighting": "binary"}
AWAC = {"weighting": Exponential(2.0, 1.2)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param(AWAC, id="awac", marks=pytest.mark.slow), pytest.param(CRR, id="crr")])
@BOTH
def test_an_update_of_awac_and_crr_equals_an_independent_implementation(options, continuous):
    """The policy's values are soft ones at the temperature 0."""
    over = options is CRR and continuous  # of discrete actions the mean is exact
    draws = 3 if options is CRR else 1
    critic = OfPolicy(draws, "max" if over else "mean")
    agent, config, dataset = make("iql", continuous, critic=critic, **options)
    state, after, metrics = two_states(agent)
    batch, _, key = drawn(config, dataset, state)
    keys = jax.random.split(key, (2, draws, B))
    normal = np.asarray(jax.jit(jax.vmap(jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (2,))))))(keys))

    @jax.jit
    def constants(params, target_critic):
        def values(critic, obs, noise):
            return [plain_soft_value(critic, plain_policy(params, obs, x, continuous), obs, 0.0)[0] for x in noise]

        target = batch.reward + batch.discount * sum(values(target_critic, batch.next_obs, normal[0])) / draws
        outcome = jnp.minimum(*(plain_critic(params["critic"], i, batch, continuous) for i in range(2)))
        advantage = outcome - getattr(jnp.stack(values(params["critic"], batch.obs, normal[1])), "max" if over else "mean")(0)
        return target, (advantage > 0) * 1.0 if options is CRR else jnp.minimum(jnp.exp(2 * advantage), 1.2)

    target, weight = constants(state.params, state.target_params)
    assert weight.max() == np.float32(1 if options is CRR else 1.2) > weight.min()
    losses = {
        "actor": lambda params: -(weight * plain_likelihood(params, batch, continuous)).mean(),
        "critic": lambda params: sum(((plain_critic(params, i, batch, continuous) - target) ** 2).mean() / 2 for i in range(2)),
    }
    assert state.params.keys() == losses.keys()
    assert_updated(state, after, config, losses, metrics)


@pytest.mark.slow
def test_of_discrete_actions_the_best_of_a_few_is_no_bound():
    """The best of all would be one, and no action in the data better."""
    agent, *_ = make("iql", False, critic=OfPolicy(2, "max"), weighting="binary")
    *_, metrics = two_states(agent)
    assert 0 < metrics["weight"] < 1


@pytest.mark.long
@pytest.mark.parametrize(
    "target_gap", [pytest.param(None, id="fixed", marks=pytest.mark.slow), pytest.param(0.3, id="lagrange")]
)
def test_an_update_of_cql_on_sac_equals_an_independent_implementation(target_gap):
    agent, config, dataset = make("cql", True, num_samples=S, conservative_weight=0.8, target_gap=target_gap)
    state, after, metrics = two_states(agent)
    batch, _, key = drawn(config, dataset, state)
    keys = jax.random.split(key, (2 + 3 * S, B))
    normal = np.asarray(jax.jit(jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (2,)))))(keys))
    uniform = np.asarray(jax.jit(jax.vmap(jax.vmap(lambda k: jax.random.uniform(k, (2,), minval=-1.0, maxval=1.0))))(keys))
    looked = [batch.obs] * S + [batch.next_obs] * S
    drawn_now = jax.jit(lambda params: [plain_policy(params, o, normal[2 + S + j], True) for j, o in enumerate(looked)])
    samples = [(u, np.log(1 / 4)) for u in uniform[2 : 2 + S]] + drawn_now(state.params)

    def gaps(critic):
        for i in range(2):
            q = [plain_mlp(one(critic, i), jnp.concatenate([batch.obs, a], -1))[:, 0] for a, _ in samples]
            weights = [jnp.exp(q_j - log_prob) for q_j, (_, log_prob) in zip(q, samples, strict=True)]
            yield jnp.log(sum(weights) / (3 * S)) - plain_critic(critic, i, batch, True)

    losses = plain_losses(state, batch, normal[:2], True, -2.0, True)
    weight = 0.8 if target_gap is None else np.exp(state.params["log_weight"])
    losses["critic"] = lambda critic, sac=losses["critic"]: sac(critic) + weight * sum(gap.mean() for gap in gaps(critic))
    assert_updated(state, after, config, losses)
    gap = jax.jit(lambda critic: sum(gap.mean() for gap in gaps(critic)) / 2)(state.params["critic"])
    np.testing.assert_allclose(metrics["conservative_gap"], gap, rtol=1e-4)
    if target_gap is not None:
        # The weight rises while the gap is above its target, and falls below it.
        assert (after.params["log_weight"] > state.params["log_weight"]) == (gap > target_gap)
        np.testing.assert_allclose(metrics["conservative_weight"], weight, rtol=1e-6)


@pytest.mark.long
def test_an_update_of_cql_on_dqn_equals_an_independent_implementation():
    agent, config, dataset = make("cql", False, conservative_weight=0.6, tau=0.1)
    state, after, metrics = two_states(agent)
    batch, _, _ = drawn(config, dataset, state)
    q = lambda params, obs, xp=np: plain_q(params, obs, False, xp)
    best = q(wide(state.params), batch.next_obs).argmax(-1)
    target = batch.reward + batch.discount * q(wide(state.target_params), batch.next_obs)[np.arange(B), best]

    def loss(params):
        values = q(params, batch.obs, jnp)
        taken = values[np.arange(B), batch.action]
        return ((taken - target) ** 2 / 2 + 0.6 * (jnp.log(jnp.exp(values).sum(-1)) - taken)).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(state.params)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-4)
    moments = state.opt_state[1][0]
    count, rate = int(moments.count) + 1, LEFT * config.learning_rate

    def step(p, g, m, v):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        return p - rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-5)

    assert_close(after.params, jax.tree.map(step, wide(state.params), wide(gradient), wide(moments.mu), wide(moments.nu)))
    moved = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, wide(state.target_params), wide(after.params))
    assert_close(after.target_params, moved)


def test_held_out_episodes_are_never_learned_from():
    agent, _, dataset = make("bc", False)
    held = agent.data["data"]
    rows = [np.asarray(x.items[0]).reshape(-1, 3) for x in (held.training, held.validation)]
    where = [{int(np.flatnonzero((dataset.obs == row).all(1))[0]) // LENGTH for row in part} for part in rows]
    assert len(where[1]) == 16 and not where[0] & where[1]
    assert len(rows[0]) == 144 * LENGTH and len(rows[1]) == 16 * LENGTH


def test_updates_are_numbered_and_what_was_learned_last_is_measured_by_what_was_held_out():
    """Updates are counted in place of learning: a number is that of the update before, plus one."""
    batches, held_out = (replay.NStep(*[jnp.full(shape, x)] * 5) for shape, x in (((3, 4), 1.0), ((4,), 2.0)))

    def update(made, batch, key, progress):
        number = to_float(progress.iteration)
        return made + 1, {"number": number, "rate": progress.fraction, "made": made, "obs": batch.obs.max()}

    learned, key = jnp.float32(0), jax.random.key(0)
    for i in range(2):
        learned, key, metrics = learn_from(batches, held_out, update, learned, key, Progress(counter(i), 4))
        assert metrics["number"] == metrics["made"] == 3 * i + 1 and metrics["obs"] == 1
        np.testing.assert_allclose(metrics["rate"], (3 * i + 1) / 12, rtol=1e-6)  # of 4 iterations of 3 updates
        assert metrics["validation_number"] == metrics["validation_made"] == learned == 3 * i + 3
        assert metrics["validation_obs"] == 2


@pytest.mark.slow
def test_no_environment_is_stepped():
    agent = counted(make("bc", False)[0])
    state = agent.with_data(jax.eval_shape(agent.init, jax.random.key(0)))
    policy = msrl.policies.SingleLearnerCoarse()
    program = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=jax.devices()[:4])
    plan = program.explain()
    assert {f.role for f in plan.fragments} == {"buffer", "learner", "server"}
    # A policy that sets devices apart for acting has nothing to do there.
    placements = {f.placement for f in plan.fragments}
    assert len(placements) == 1 and placements == {p.placement for p in plan.programs}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs of IQL on a file."""
    path = tmp_path_factory.mktemp("offline") / "noise.npz"
    data.save(noise(RandomWalk()), path)
    return lambda **seeds: msrl.train(
        "iql",
        RandomWalk(),
        data=str(path),
        total_steps=40,
        chunk=2,
        eval_episodes=8,
        progress=False,
        devices=jax.devices()[:1],
        **seeds,
        **SMALL | {"num_updates": 10},
    )


@pytest.fixture(scope="module")
def both(train):
    """Two seeds at once."""
    return train(seeds=2)


@pytest.fixture(scope="module")
def alone(train):
    """The second one of the seeds."""
    return train(seed=1)


@pytest.mark.slow
def test_members_are_compared_by_what_was_held_out(both):
    losses = both.history["validation_loss"][-1]
    for last in ([1.0, 2.0], [2.0, 1.0]):
        evaluation = dataclasses.replace(both.evaluation, returns=np.tile(np.float32(last)[:, None], 8))
        assert dataclasses.replace(both, evaluation=evaluation).best == losses.argmin()
    nothing = {name: column for name, column in both.history.items() if not name.startswith("validation")}
    with pytest.raises(ValueError, match=r"by their validation loss, .* choose one, member=0, or train"):
        dataclasses.replace(both, history=nothing).best  # noqa: B018


@pytest.mark.long
def test_a_run_comes_back_without_its_data(alone, tmp_path):
    """Loading refuses a checkpoint with more in it than there is in the state without data."""
    loaded = msrl.Result.load(alone.save(tmp_path / "run"), env=RandomWalk())
    assert loaded.state.data == () and loaded.config.data is None and loaded.behavior.agent.unit == "updates"
    obs = jnp.linspace(-1, 1, 12).reshape(4, 3)
    np.testing.assert_array_equal(loaded.act(obs), alone.act(obs))
    np.testing.assert_array_equal(loaded.evaluate(4).returns, alone.evaluate(4).returns)
    with pytest.raises(ValueError, match=r"iql learns from data alone, but there is none; give data='experience.npz'"):
        msrl.train("iql", RandomWalk(), total_steps=40, progress=False, **SMALL)


@pytest.mark.parametrize(
    ("name", "continuous", "options", "message"),
    [
        ("cql", False, {"target_gap": 1.0}, r"target_gap=1.0 does not work for discrete actions"),
        ("cql", True, {"target_gap": 1.0, "conservative_weight": 0.0}, "conservative_weight=0 cannot be learned"),
        ("iql", True, {"critic.expectile": 1.2}, r"IQL\.critic\.expectile=1.2: use a finite number at least 0 and at most 1"),
        ("bc", True, {"validation_fraction": 1.0}, "validation_fraction=1.0: use a finite number at least 0 and below 1"),
        ("bc", True, {"batch_size": 4096}, "fewer than batch_size=4096"),
        ("bc", True, {"shards": 128}, r"holds 64 of 640 rows out, fewer than one in each of shards=128; use a larger"),
        (
            "bc",
            True,
            {"data": noise(RandomWalk(True)).select(slice(0, 2))},
            "validation_fraction=0.1 .*; use validation_fraction=0",
        ),
        ("bc", True, {"data": noise(RandomWalk(False))}, "action of the data set has shape"),
        ("bc", True, {"data": "there/is/none.npz"}, "does not exist; write one"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(name, continuous, options, message):
    with pytest.raises(ValueError, match=message):
        algorithms.make(name, {"data": noise(RandomWalk(continuous))} | options).build(RandomWalk(continuous))
