"""Returns and advantages against sums in float64, and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_jax.kernels import time as kernels
from msrl_jax.returns import gae, lambda_return, n_step_return, retrace, standardize, vtrace

T, E = 13, 3


def episodes(terminated, truncated):
    """The steps of each episode of one environment's unroll, the last one cut off by its end."""
    start = 0
    for t in range(len(terminated)):
        if terminated[t] or truncated[t] or t == len(terminated) - 1:
            yield range(start, t + 1)
            start = t + 1


def per_environment(reference):
    """Applies a reference to each environment of arrays `[T, E]`, in float64."""

    @functools.wraps(reference)
    def apply(*columns, **options):
        wide = [x if x.dtype == bool else x.astype(np.float64) for x in columns]
        return np.stack([reference(*[x[:, e] for x in wide], **options) for e in range(E)], -1)

    return apply


@per_environment
def summed_gae(reward, value, next_value, terminated, truncated, *, discount, gae_lambda):
    """Sums the discounted errors of each episode forwards (eq. 16)."""
    advantage = np.zeros(T)
    for steps in episodes(terminated, truncated):
        for t in steps:
            for k in range(t, steps.stop):
                future = 0.0 if terminated[k] else next_value[k]
                advantage[t] += (discount * gae_lambda) ** (k - t) * (reward[k] + discount * future - value[k])
    return advantage


@per_environment
def summed_n_step(reward, next_value, terminated, truncated, *, discount, num_steps):
    """Sums at most `num_steps` rewards, then adds a value."""
    returns = np.zeros(T)
    for steps in episodes(terminated, truncated):
        for t in steps:
            last = min(t + num_steps, steps.stop) - 1
            returns[t] = sum(discount ** (k - t) * reward[k] for k in range(t, last + 1))
            returns[t] += discount ** (last + 1 - t) * (0.0 if terminated[last] else next_value[last])
    return returns


@per_environment
def mixed_n_step(reward, next_value, terminated, truncated, *, discount, lambda_):
    """Mixes the n-step returns of each episode with weights (1 - lambda) lambda^(n-1); the longest has what is left."""
    returns = np.zeros(T)
    for steps in episodes(terminated, truncated):
        for t in steps:
            longest, total = steps.stop - t, 0.0
            for n in range(1, longest + 1):
                total += discount ** (n - 1) * reward[t + n - 1]
                future = 0.0 if terminated[t + n - 1] else next_value[t + n - 1]
                weight = lambda_ ** (n - 1) * (1 - lambda_ if n < longest else 1)
                returns[t] += weight * (total + discount**n * future)
    return returns


@per_environment
def summed_vtrace(ratio, reward, value, next_value, terminated, truncated, *, discount, lambda_, rho, c, pg_rho):
    """Sums eq. 1 forwards; then the weighted one-step advantages of the corrected successors."""
    target, advantage = np.zeros(T), np.zeros(T)
    for steps in episodes(terminated, truncated):
        future = lambda k: 0.0 if terminated[k] else next_value[k]
        for s in steps:
            target[s] = value[s]
            for t in range(s, steps.stop):
                trace = np.prod([lambda_ * min(c, ratio[i]) for i in range(s, t)])
                error = min(rho, ratio[t]) * (reward[t] + discount * future(t) - value[t])
                target[s] += discount ** (t - s) * trace * error
        for s in steps:
            after = target[s + 1] if s + 1 in steps else future(s)
            advantage[s] = min(pg_rho, ratio[s]) * (reward[s] + discount * after - value[s])
    return np.stack([target, advantage])


@per_environment
def summed_retrace(ratio, reward, action_value, next_value, terminated, truncated, *, discount, lambda_):
    """Sums eq. 3 forwards: the traces of an error are those of the actions between it and the first one."""
    target = action_value.copy()
    for steps in episodes(terminated, truncated):
        for s in steps:
            for t in range(s, steps.stop):
                trace = np.prod([lambda_ * min(1.0, ratio[i]) for i in range(s + 1, t + 1)])
                future = 0.0 if terminated[t] else next_value[t]
                target[s] += discount ** (t - s) * trace * (reward[t] + discount * future - action_value[t])
    return target


def continuing(value, next_value, terminated, truncated):
    """Values of successors that agree with `value` inside episodes, as those of a real unroll do."""
    next_value = next_value.copy()
    inside = ~(terminated | truncated)[:-1]
    next_value[:-1][inside] = value[1:][inside]
    return next_value


@st.composite
def trajectories(draw):
    """Rewards, values and log-ratios `[T, E]`, and episodes that end anywhere in either way or in both."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    reward, value, next_value, log_ratio = rng.normal(size=(4, T, E)).astype(np.float32)
    how_often = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    terminated, truncated = (rng.random((T, E)) < p for p in how_often)
    return reward, value, next_value, terminated, truncated, log_ratio


discounts, lambdas = st.sampled_from([0.0, 0.9, 0.99, 1.0]), st.sampled_from([0.0, 0.8, 0.95, 1.0])
clips = st.sampled_from([0.3, 1.0, 2.0])
many = settings(max_examples=50, deadline=None)


def jitted(fn):
    """Compiles a function once: the numbers are traced, the number of steps is static."""
    return jax.jit(fn, static_argnames="num_steps" if fn is n_step_return else ())


jitted_gae, jitted_n_step, jitted_lambda, jitted_vtrace, jitted_retrace = map(
    jitted, (gae, n_step_return, lambda_return, vtrace, retrace)
)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5)


@many
@given(trajectories(), discounts, lambdas)
def test_gae_equals_float64_sums_wherever_episodes_end(trajectory, discount, gae_lambda):
    options = {"discount": discount, "gae_lambda": gae_lambda}
    close(jitted_gae(*trajectory[:5], **options), summed_gae(*trajectory[:5], **options))


@many
@given(trajectories(), discounts, st.sampled_from([1, 2, 5, T, T + 4]))
def test_n_step_returns_equal_float64_sums_wherever_episodes_end(trajectory, discount, num_steps):
    reward, _, next_value, terminated, truncated, _ = trajectory
    columns, options = (reward, next_value, terminated, truncated), {"discount": discount, "num_steps": num_steps}
    close(jitted_n_step(*columns, **options), summed_n_step(*columns, **options))


@many
@given(trajectories(), discounts, lambdas)
def test_lambda_returns_mix_n_step_returns_wherever_episodes_end(trajectory, discount, lambda_):
    reward, _, next_value, terminated, truncated, _ = trajectory
    columns, options = (reward, next_value, terminated, truncated), {"discount": discount, "lambda_": lambda_}
    close(jitted_lambda(*columns, **options), mixed_n_step(*columns, **options))


@many
@given(trajectories(), discounts, lambdas, clips, clips, clips)
def test_vtrace_equals_float64_sums_wherever_episodes_end(trajectory, discount, lambda_, rho, c, pg_rho):
    reward, value, next_value, terminated, truncated, log_ratio = trajectory
    next_value = continuing(value, next_value, terminated, truncated)
    columns, ratio = (reward, value, next_value, terminated, truncated), np.exp(log_ratio.astype(np.float64))
    options = {"discount": discount, "lambda_": lambda_}
    got = jitted_vtrace(log_ratio, *columns, **options, clip_rho=rho, clip_c=c, clip_pg_rho=pg_rho)
    want = summed_vtrace(ratio, *columns, **options, rho=rho, c=c, pg_rho=pg_rho)
    np.testing.assert_allclose(np.stack(got), want, rtol=1e-4, atol=1e-4)


@many
@given(trajectories(), discounts, lambdas)
def test_retrace_equals_float64_sums_wherever_episodes_end(trajectory, discount, lambda_):
    reward, value, next_value, terminated, truncated, log_ratio = trajectory
    columns, ratio = (reward, value, next_value, terminated, truncated), np.exp(log_ratio.astype(np.float64))
    options = {"discount": discount, "lambda_": lambda_}
    close(jitted_retrace(log_ratio, *columns, **options), summed_retrace(ratio, *columns, **options))


@many
@given(trajectories(), discounts, lambdas)
def test_on_policy_the_corrections_vanish(trajectory, discount, lambda_):
    """With ratios of 1, V-trace's targets are lambda-returns, and so are Retrace's of values that do not depend on actions."""
    reward, value, next_value, terminated, truncated, _ = trajectory
    next_value = continuing(value, next_value, terminated, truncated)
    columns, zeros = (reward, value, next_value, terminated, truncated), np.zeros((T, E), np.float32)
    want = jitted_lambda(reward, next_value, terminated, truncated, discount=discount, lambda_=lambda_)
    close(jitted_vtrace(zeros, *columns, discount=discount, lambda_=lambda_).target, want)
    close(jitted_retrace(zeros, *columns, discount=discount, lambda_=lambda_), want)
    advantage = jitted_vtrace(zeros, *columns, discount=discount).advantage
    close(advantage, jitted_gae(*columns, discount=discount, gae_lambda=1.0))


def absent(trajectory, how_often, seed):
    """Which steps are present; and a trajectory whose episodes end at absent steps and before them, as `valid` promises."""
    reward, value, next_value, terminated, truncated, log_ratio = trajectory
    valid = np.random.default_rng(seed).random((T, E)) >= how_often
    cut = truncated | ~valid | np.concatenate([~valid[1:], np.zeros((1, E), bool)])
    next_value = continuing(value, next_value, terminated, cut)
    return valid, (reward, value, next_value, terminated, truncated), (reward, value, next_value, terminated, cut), log_ratio


shares, seeds = st.sampled_from([0.1, 0.5, 1.0]), st.integers(0, 99)


@many
@given(trajectories(), shares, seeds, discounts, lambdas)
def test_gae_of_steps_that_are_absent_is_0_and_ends_the_sums_before_them(trajectory, how_often, seed, discount, gae_lambda):
    valid, given, cut, _ = absent(trajectory, how_often, seed)
    options = {"discount": discount, "gae_lambda": gae_lambda}
    close(jitted_gae(*given, valid, **options), np.where(valid, summed_gae(*cut, **options), 0.0))


@many
@given(trajectories(), shares, seeds, discounts, lambdas)
def test_vtrace_of_steps_that_are_absent_is_their_value_and_ends_the_traces_before_them(
    trajectory, how_often, seed, discount, lambda_
):
    valid, given, cut, log_ratio = absent(trajectory, how_often, seed)
    options, ratio = {"discount": discount, "lambda_": lambda_}, np.exp(log_ratio.astype(np.float64))
    got = jitted_vtrace(log_ratio, *given, valid, **options)
    target, advantage = summed_vtrace(ratio, *cut, **options, rho=1.0, c=1.0, pg_rho=1.0)
    np.testing.assert_allclose(got.target, np.where(valid, target, given[1]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got.advantage[valid], advantage[valid], rtol=1e-4, atol=1e-4)


def test_gae_by_hand():
    """Two episodes: one is cut off after two steps, where the future is worth 8; the other terminates."""
    # Backwards with discount 1/2 and lambda 1/2: 1 + 0 - 2 = -1, then 1 + 2/2 - 4 - 1/4 = -2.25 for the second episode;
    # 1 + 8/2 - 2 = 3, then 1 + 2/2 - 4 + 3/4 = -1.25 for the first.
    got = gae(jnp.ones(4), jnp.array([4.0, 2.0, 4.0, 2.0]), *SUCCESSORS, discount=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(got, [-1.25, 3.0, -2.25, -1.0])


SUCCESSORS = (jnp.array([2.0, 8.0, 2.0, 100.0]), jnp.array([False, False, False, True]), jnp.array([False, True, False, False]))


def test_returns_by_hand():
    """The same episodes, discounted by 1/2: 1 + 8/2 = 5 and 1 + 5/2 = 3.5, then 1 and 1 + 1/2."""
    whole = n_step_return(jnp.ones(4), *SUCCESSORS, discount=0.5)
    np.testing.assert_allclose(whole, [3.5, 5.0, 1.5, 1.0])
    np.testing.assert_allclose(n_step_return(jnp.ones(4), *SUCCESSORS, discount=0.5, num_steps=1), [2.0, 5.0, 2.0, 1.0])
    # Half of the one-step return and half of the longer one.
    half = lambda_return(jnp.ones(4), *SUCCESSORS, discount=0.5, lambda_=0.5)
    np.testing.assert_allclose(half, [2.75, 5.0, 1.75, 1.0])


def test_off_policy_targets_by_hand():
    """The same episodes; every action is now half as likely, but the fourth, which is three times as likely."""
    value, log_ratio = jnp.array([4.0, 2.0, 4.0, 2.0]), jnp.log(jnp.array([0.5, 0.5, 0.5, 3.0]))
    # The errors -2, 3 and -2, -1 are weighed to -1, 1.5 and -1, -1, and the traces of the first actions are 1/2. Targets:
    # 4 - 1 + 1.5/4 and 2 + 1.5, then 4 - 1 - 1/4 and 2 - 1.
    got = vtrace(log_ratio, jnp.ones(4), value, *SUCCESSORS, discount=0.5)
    np.testing.assert_allclose(got.target, [3.375, 3.5, 2.75, 1.0], rtol=1e-6)
    # Advantages, from the targets one step later: (1 + 3.5/2 - 4)/2 and (1 + 8/2 - 2)/2, then (1 + 1/2 - 4)/2 and 1 - 2.
    np.testing.assert_allclose(got.advantage, [-0.625, 1.5, -1.25, -1.0], rtol=1e-6)
    # Retrace weighs an error by the traces of later actions only: 4 - 2 + 3/4 and 2 + 3, then 4 - 2 - 1/2 and 2 - 1.
    got = retrace(log_ratio, jnp.ones(4), value, *SUCCESSORS, discount=0.5)
    np.testing.assert_allclose(got, [2.75, 5.0, 1.5, 1.0], rtol=1e-6)


@pytest.mark.parametrize("sums", [kernels._step_by_step, kernels._doubling])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 64, 100])
def test_sums_backwards_equal_float64_ones_on_every_kind_of_device(sums, length):
    rng = np.random.default_rng(length)
    delta, decay = rng.normal(size=(length, 3)), rng.uniform(0.0, 1.0, (length, 3)) * (rng.random((length, 3)) < 0.8)
    expected, total = np.zeros((length, 3)), np.zeros(3)
    for t in reversed(range(length)):
        expected[t] = total = delta[t] + decay[t] * total
    found = jax.jit(sums)(jnp.asarray(delta, jnp.float32), jnp.asarray(decay, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_value_after_a_terminal_state_does_not_matter_even_if_it_is_nan():
    ones, end = jnp.ones(1), jnp.ones(1, bool)
    after = (jnp.full(1, jnp.nan), end, end)
    np.testing.assert_allclose(gae(ones, ones, *after, discount=0.9, gae_lambda=0.9), [0.0])
    np.testing.assert_allclose(lambda_return(ones, *after, discount=0.9, lambda_=0.5), [1.0])
    np.testing.assert_allclose(n_step_return(ones, *after, discount=0.9, num_steps=1), [1.0])
    np.testing.assert_allclose(vtrace(ones, ones, ones, *after, discount=0.9), [[1.0], [0.0]])
    np.testing.assert_allclose(retrace(ones, ones, ones, *after, discount=0.9), [1.0])


def test_no_steps_have_no_advantages():
    none, flags = jnp.ones((0, 3)), jnp.ones((0, 3), bool)
    assert gae(none, none, none, flags, flags, discount=0.9, gae_lambda=0.9).shape == (0, 3)
    assert lambda_return(none, none, flags, flags, discount=0.9, lambda_=0.9).shape == (0, 3)


def test_standardized_advantages_have_mean_0_and_deviation_1_over_all_of_them():
    advantage = np.random.default_rng(0).normal(3, 5, (T, E)).astype(np.float32)
    wide = advantage.astype(np.float64)
    np.testing.assert_allclose(standardize(advantage), (wide - wide.mean()) / wide.std(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(standardize(jnp.full((T, E), 2.0)), np.zeros((T, E)))


def test_one_advantage_alone_stays_as_it_is():
    """Standardized it would be 0, and nothing would be learned from it."""
    one = jnp.float32([[3.0]])
    np.testing.assert_array_equal(standardize(one), one)
    advantage, counts = jnp.float32([[3.0, 100.0, -7.0]]), jnp.array([[False, True, False]])
    np.testing.assert_array_equal(jax.jit(standardize)(advantage, counts)[counts], [100.0])
    assert (jax.jit(standardize)(advantage, ~counts)[~counts] == jnp.float32([1.0, -1.0])).all()


@pytest.mark.parametrize(
    ("estimate", "inputs"),
    [
        (functools.partial(gae, discount=0.9, gae_lambda=0.9), 3),
        (functools.partial(n_step_return, discount=0.9, num_steps=2), 2),
        (functools.partial(lambda_return, discount=0.9, lambda_=0.9), 2),
        (functools.partial(vtrace, discount=0.9), 4),
        (functools.partial(retrace, discount=0.9), 4),
    ],
    ids=["gae", "n_step_return", "lambda_return", "vtrace", "retrace"],
)
def test_shapes_that_would_broadcast_are_refused(estimate, inputs):
    numbers, flags = [jnp.zeros((T, E))] * inputs, [jnp.zeros((T, E), bool)] * 2
    estimate(*numbers, *flags)
    for i in range(inputs + 2):
        arguments = [*numbers, *flags]
        arguments[i] = arguments[i][:, :1]
        with pytest.raises(AssertionError, match="different shapes"):
            estimate(*arguments)
