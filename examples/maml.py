"""MAML (Finn et al., 2017, arXiv 1703.03400): parameters from which one step of policy gradient learns a task.

    python examples/maml.py --svg docs/example_maml.svg
    python examples/maml.py --policy examples.maml:Apart --cpu-devices 8

An algorithm with its own role: `"actor:adapter"` takes the step, for each task. In the shape descriptions, `N` is the
number of tasks, `K` of rollouts of each, `T` of steps of a rollout, and `A` of components of an action.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.algorithms import Agent, config, counted, field, tunable
from msrl_jax.cli import argument_types
from msrl_jax.envs.base import is_on_host
from msrl_jax.losses import clipped_surrogate_loss
from msrl_jax.policies import Layout, Placement
from msrl_jax.report import curves
from msrl_jax.returns import lambda_return, standardize

GOALS = {"goal": envs.uniform([-0.5, -0.5], [0.5, 0.5])}
STEPS, NEW_TASKS = 3_200_000, 200
RETURNS = "return_before", "return_after"  # the metrics of MAML: before and after the step, on average over tasks and rollouts
TRAINED = {"MAML": 0.3, "pretrained": 0.0}  # sizes of the step in training: without one, all tasks get one policy
RATES = {"MAML": 0.25, "pretrained": 0.25, "pretrained, step tuned": 2.5, "random, step tuned": 3.0}  # on new tasks


@dataclasses.dataclass(frozen=True)
class Navigation:
    """A point in the plane starts at the origin, and is rewarded for being near a goal, which it does not see."""

    goal: Any = (0.0, 0.0)
    observation_space = envs.Box(-np.inf, np.inf, (2,))
    action_space = envs.Box(-0.1, 0.1, (2,))  # by how much it moves

    @property
    def default_params(self):  # noqa: D102
        return {"goal": np.asarray(self.goal, np.float32)}

    def with_params(self, params):  # noqa: D102
        return dataclasses.replace(self, **params)

    def reset(self, key):  # noqa: D102
        return jnp.zeros(2), jnp.zeros(2)

    def step(self, key, state, action):  # noqa: D102
        position = state + jnp.clip(action, -0.1, 0.1)
        distance = jnp.sum((position - jnp.asarray(self.goal)) ** 2)
        return position, position, -distance, distance < 0.01**2, jnp.asarray(False)


class Rollouts(NamedTuple):
    """The data of rollouts, `[T, N, K]`, or `[T, K]` in one task."""

    obs: jax.Array  # [T, N, K, D]
    action: jax.Array  # in units of the largest ones, before they are clipped, [T, N, K, A]
    log_prob: jax.Array  # of the action when it was taken
    advantage: jax.Array
    valid: jax.Array  # which steps are part of an episode, bool


class Gaussian(nn.Module):
    """A policy: the mean of an action and the logarithm of its deviation. `[..., A]` and `[A]`"""

    size: int
    hidden_sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, obs):  # noqa: D102
        for width in self.hidden_sizes:
            obs = nn.tanh(nn.Dense(width)(obs))
        mean = nn.Dense(self.size, kernel_init=nn.initializers.orthogonal(0.01))(obs)
        return mean, self.param("log_deviation", nn.initializers.zeros, (self.size,))


def log_prob(policy, action):
    """The log-probability of actions `[..., A]` under a policy, its means and log-deviations. `[...]`"""
    mean, log_deviation = policy
    return jnp.sum(-0.5 * ((action - mean) / jnp.exp(log_deviation)) ** 2 - log_deviation - 0.5 * np.log(2 * np.pi), -1)


def advantages(obs, reward, valid, discount):
    """Standardized returns to go less a baseline of the task, linear in place and time, which is fitted to them. `[T, K]`"""
    never = jnp.zeros_like(valid)
    returns = lambda_return(reward, jnp.zeros_like(reward), never, never, discount=discount, lambda_=1.0)
    time = jnp.broadcast_to(jnp.arange(len(reward))[:, None, None] / len(reward), (*reward.shape, 1))
    x = jnp.concatenate([jnp.ones_like(time), time, time**2, time**3, obs, obs**2], -1) * valid[..., None]
    gram, moment = jnp.einsum("tki,tkj->ij", x, x), jnp.einsum("tki,tk->i", x, returns)
    weights = jnp.linalg.solve(gram + 1e-3 * valid.sum() * jnp.eye(len(gram)), moment)
    return standardize(returns - x @ weights, valid)


def task_loss(apply: Callable, params: Any, rollouts: Rollouts, clip_ratio: Any = jnp.inf) -> jax.Array:
    """PPO's loss in one task: minus the mean of advantages, each weighted by the action's probability now over that before."""
    log_ratio = log_prob(apply(params, rollouts.obs), rollouts.action) - rollouts.log_prob
    losses = clipped_surrogate_loss(log_ratio, rollouts.advantage, clip_ratio)
    return jnp.sum(jnp.where(rollouts.valid, losses, 0.0)) / rollouts.valid.sum()


def adapted(apply: Callable, params: Any, rollouts: Rollouts, rate: Any) -> Any:
    """The parameters after one step of policy gradient in one task.

    For the parameters that acted, all weights of the loss are 1, and its gradient is the policy gradient. But weights depend on
    the parameters, as what is sampled does. So the second derivative is that of the expected return too, but for products of
    scores of different steps (1810.06784, section 5).
    """
    return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(task_loss, 1)(apply, params, rollouts))


def meta_loss(apply: Callable, params: Any, before: Rollouts, after: Rollouts, rate: Any, clip_ratio: Any) -> jax.Array:
    """The loss of the adapted parameters, as a function of those before: the mean over tasks. `[]`"""
    return jax.vmap(lambda b, a: task_loss(apply, adapted(apply, params, b, rate), a, clip_ratio), 1)(before, after).mean()


class State(NamedTuple):
    """The state of a run."""

    params: Any
    opt_state: Any
    keys: Any  # one for each task, [N]
    env_state: Any = ()  # tasks restart in every iteration


@config("maml")
class MAML:
    """Model-agnostic meta-learning of a Gaussian policy. A task is what a reset draws: parameters, and the first state."""

    num_envs: int = field(default=20, doc="tasks per iteration, `N`. Usual: 20 to 40.")
    num_rollouts: int = field(default=20, low=2, doc="rollouts per task, before and after its step, `K`. Usual: 10 to 40.")
    unroll_length: int = field(default=100, doc="steps of a rollout, `T`, if its episode does not end before. Usual: 100.")
    inner_rate: float = tunable(default=0.3, low=0, doc="size of a task's step; with 0, there is none. Usual: 0.1 to 1.")
    learning_rate: float = tunable(default=3e-3, above=0, doc="step size of Adam, for the shared parameters. Usual: 1e-3.")
    num_epochs: int = field(default=5, doc="steps of Adam per iteration. Usual: 1 to 10.")
    clip_ratio: float = tunable(default=0.2, above=0, doc="clip of the adapted policies' probability ratios. Usual: 0.2.")
    discount: float = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of the dense layers. Usual: (64, 64).")

    def build(self, env):  # noqa: D102
        seen, space, shape = env.observation_space, env.action_space, (self.num_envs, self.num_rollouts)
        fits = all(isinstance(s, envs.Box) and len(s.shape) == 1 for s in (seen, space)) and not is_on_host(env)
        if not fits or not jnp.issubdtype(space.dtype, jnp.floating) or not np.isfinite([space.low, space.high]).all():
            what = "environments on devices, vectors as observations and bounded ones of floats as actions"
            raise TypeError(f"maml takes {what}, and was given {seen} and {space}")
        policy: Any = Gaussian(space.shape[0], self.hidden_sizes)
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(self.learning_rate))

        def choose(params, obs, key):
            mean, log_deviation = policy.apply(params, obs)
            action = mean + jnp.exp(log_deviation) * jax.random.normal(key, mean.shape)
            return action, log_prob((mean, log_deviation), action)

        def of_env(action):
            return jnp.clip(space.low + (space.high - space.low) * (action + 1) / 2, space.low, space.high)

        act = msrl.fragment(role="actor", name="act")(jax.vmap(choose, (None, 0, 0)))
        act_adapted = msrl.fragment(role="actor", name="act_adapted")(jax.vmap(choose))

        @msrl.fragment(role="env")
        def draw_tasks(keys):  # rollouts start in the same way; and keys of actors and environments in both phases, [T, N]
            keys = jax.vmap(lambda key: jax.random.split(key, 2 + 4 * self.unroll_length), out_axes=1)(keys)
            start = jax.vmap(env.reset)(keys[1])
            start = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (*shape, *x.shape[1:])), start)
            return keys[0], (*start, jnp.ones(shape, bool)), (keys[2::4], keys[3::4]), (keys[4::4], keys[5::4])

        @msrl.fragment(role="env")
        def env_step(keys, env_state, valid, action):
            keys = jax.vmap(lambda key: jax.random.split(key, self.num_rollouts))(keys)
            env_state, obs, reward, terminated, truncated = jax.vmap(jax.vmap(env.step))(keys, env_state, of_env(action))
            return (env_state, obs, valid & ~(terminated | truncated)), jnp.where(valid, reward, 0.0)

        @msrl.fragment(role="actor")
        def judge(obs, action, log_prob, reward, valid):
            advantage = jax.vmap(functools.partial(advantages, discount=self.discount), 1, 1)(obs, reward, valid)
            return Rollouts(obs, action, log_prob, advantage, valid), msrl.Mean(reward.sum(), jnp.float32(reward[0].size))

        @msrl.fragment(role="actor:adapter")
        def adapt(params, before):
            return jax.vmap(lambda task: adapted(policy.apply, params, task, self.inner_rate), in_axes=1)(before)

        @msrl.fragment(role="learner")
        def gradients(params, before, after):
            return jax.value_and_grad(meta_loss, 1)(policy.apply, params, before, after, self.inner_rate, self.clip_ratio)

        @msrl.fragment(role="server")
        def apply_update(params, opt_state, grads):
            updates, opt_state = optimizer.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state

        def play(act, params, start, keys):
            def step(carry, keys):
                env_state, obs, valid = carry
                action, log_prob = act(params, obs, keys[0])
                carry, reward = env_step(keys[1], env_state, valid, action)
                return carry, (obs, action, log_prob, reward, valid)

            return judge(*jax.lax.scan(step, start, keys)[1])

        def iteration(state, progress):
            keys, start, *phases = draw_tasks(state.keys)
            before, first = play(act, state.params, start, phases[0])
            after, second = play(act_adapted, adapt(state.params, before), start, phases[1])

            def update(carry, _):
                loss, grads = gradients(carry[0], before, after)
                return apply_update(carry[0], carry[1], grads), loss

            (params, opt_state), losses = jax.lax.scan(update, (state.params, state.opt_state), length=self.num_epochs)
            return State(params, opt_state, keys), {"meta_loss": losses[-1], **dict(zip(RETURNS, (first, second), strict=True))}

        def init(key):
            params_key, key = jax.random.split(key)
            params = policy.init(params_key, jnp.zeros(seen.shape))
            return State(params, optimizer.init(params), jax.random.split(key, self.num_envs))

        return Agent(
            init=init,
            iteration=iteration,
            axes=State(P(), P(), P("env"), P()),
            updates_per_iteration=self.num_epochs,
            env=envs.vectorize(env, self.num_envs),
            steps_per_iteration=2 * shape[0] * shape[1] * self.unroll_length,
            act=lambda state, obs, key, carry: (of_env(policy.apply(state.params, obs)[0]), carry),  # without adaptation
        )


@dataclasses.dataclass(frozen=True)
class Apart:
    """Actors, adapters and the learner on separate devices: a layout lists a custom role like any other."""

    def layout(self, devices, sizes):  # noqa: D102
        if len(devices) < 3:
            raise ValueError(f"Apart() needs 3 devices, for actors, adapters and a learner, and there are {len(devices)}")
        count = max(n for n in range(1, (len(devices) + 1) // 2) if sizes["env"] % n == 0)
        parts = {"actors": devices[:count], "adapters": devices[count : 2 * count], "learners": devices[-1:]}
        actors, adapters, learners = (Placement.over(name, part) for name, part in parts.items())
        roles = {"env": actors, "actor": actors, "actor:adapter": adapters, "learner": learners, "server": learners}
        return Layout(roles, policy="Apart()")


def train(inner_rate: float, seeds: int, **given: Any) -> msrl.Result:
    """Trains on some seeds, without a display."""
    given = {"env_params": GOALS, "total_steps": STEPS, "chunk": 1, "eval_episodes": 0, "progress": False} | given
    return msrl.train(MAML(inner_rate=inner_rate), Navigation(), seeds=seeds, **given)


def on_new_tasks(result: msrl.Result | None, rate: float, seeds: int, first: int = 1000) -> np.ndarray:
    """The returns before and after one step on new tasks, of trained parameters or, without any, of new ones. `[seeds, 2]`"""
    agent = counted(MAML(num_envs=NEW_TASKS, inner_rate=rate).build(envs.RandomizeParams(Navigation(), GOALS)))

    def play(key, params):
        state = agent.init(key)
        state = state._replace(inner=state.inner._replace(params=params or state.inner.params))
        metrics: Any = agent.iteration(state)[1]
        return jnp.stack([metrics[name].total / metrics[name].count for name in RETURNS])

    params = [] if result is None else [result.member_state(member).params for member in range(seeds)]
    params = jax.tree.map(lambda *x: jnp.stack(x), *params) if params else {}
    keys = jax.random.split(jax.random.key(first), seeds)
    return np.asarray(jax.jit(lambda *x: jax.lax.map(lambda each: play(*each), x))(keys, params))


def figure(runs: dict[str, msrl.Result], found: dict[str, np.ndarray]) -> str:
    """Draws returns in training, and on new tasks `[seeds, 2]`, with 95% intervals of the means over seeds."""
    with curves.styled():
        drawn, (upper, lower) = curves.figure_of(2)
        for number, (name, result) in enumerate(runs.items()):
            curves.draw_curve(upper, name, number, *curves.mean_curve(result.history["step"], result.history[RETURNS[1]]))
        for number, (name, rows) in enumerate(found.items()):
            curves.draw_curve(lower, name, number, *curves.mean_curve([0, 1], rows.T))
        upper.set(xlabel="environment steps in training", ylabel="return after the step")
        lower.set(xlabel="steps of policy gradient on a new task", ylabel="return", xticks=[0, 1])
        return curves.svg_of(curves.finished(drawn))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains with and without adaptation on all seeds, and prints what one step brings on new tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=argument_types.positive_int, default=5)
    parser.add_argument("--policy", default="GPUOnly")
    parser.add_argument("--cpu-devices", type=argument_types.cpu_devices)
    parser.add_argument("--svg", type=argument_types.new_file, help="file for a figure")
    args = parser.parse_args(arguments)
    runs = {name: train(rate, args.seeds, policy=args.policy) for name, rate in TRAINED.items()}
    found = {name: on_new_tasks(runs.get(name.partition(",")[0]), rate, args.seeds) for name, rate in RATES.items()}
    for name, rows in found.items():
        print(f"{name}: before {rows[:, 0].mean():.2f}, after {rows[:, 1].mean():.2f}, on each seed", *rows[:, 1].round(2))
    if args.svg:
        args.svg.write_text(figure(runs, found))


if __name__ == "__main__":
    main()
