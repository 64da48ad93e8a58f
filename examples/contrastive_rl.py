"""Contrastive RL (Eysenbach et al., 2022, arXiv 2206.07568): goals are reached without rewards.

    python examples/contrastive_rl.py --svg docs/example_contrastive_rl.svg
    python examples/contrastive_rl.py --tasks spiral --policy SingleLearnerCoarse --cpu-devices 4

A critic learns to classify which of many goals was achieved after a state and an action. Its output for a goal is, except for a
constant, the logarithm of how probable it is to be there later, in steps that the discount weighs; an actor maximizes it. The
losses are those of JaxGCRL (Bortkiewicz et al., 2024, arXiv 2408.11052). The buffer, the goals and the actor's entropy are
those of the package's SAC. In the shape descriptions, `B` is the batch size and `R` the size of representations.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.agents.action_spaces import check_bounded
from msrl_jax.agents.agent import learning_rate_at, split_keys, steps_before
from msrl_jax.agents.optimizers import for_each_network, make_optimizer
from msrl_jax.algorithms import SAC, Agent, Hindsight, Replay, config, field, tunable
from msrl_jax.cli import argument_types
from msrl_jax.envs.actions import action_transform, uniform_actions
from msrl_jax.envs.goals import goals_of
from msrl_jax.fragments.counters import at_least
from msrl_jax.loops.off_policy import Batch, Learner, OffPolicyState, apply_if, draw, initial_state, learn_from, state_axes
from msrl_jax.loops.replay_buffers import n_step_buffer
from msrl_jax.losses.entropy import soft_value, temperature_loss
from msrl_jax.networks.continuous_policies import tanh_policy
from msrl_jax.networks.distributions import choose
from msrl_jax.networks.heads import linear_network
from msrl_jax.networks.network import Network
from msrl_jax.replay import Transition
from msrl_jax.report import curves


@dataclasses.dataclass(frozen=True)
class Task:
    """A maze, for how many steps it is learned, and the learning rate of each of `ALGORITHMS`."""

    maze: envs.PointMaze
    steps: int
    learning_rates: tuple[float, ...]


TASKS = {
    "spiral": Task(envs.PointMaze("spiral"), 40_000, (3e-3, 1e-2, 1e-2)),
    "u": Task(envs.PointMaze("u", 50, tolerance=0.05), 15_000, (3e-3, 1e-3, 1e-3)),
}


def energies(squared_distances: jax.Array) -> jax.Array:
    """Minus the distances of representations, so the largest is 0. `[...]`"""
    return -jnp.sqrt(jnp.maximum(squared_distances, 0) + 1e-6)  # the derivative of a root has no limit at 0


def all_energies(pair: jax.Array, goal: jax.Array) -> jax.Array:
    """Energies of all pairs and all goals `[B, R]`, by a product of matrices, which is faster than differences. `[B, B]`"""
    return energies(jnp.sum(pair**2, -1)[:, None] + jnp.sum(goal**2, -1) - 2 * pair @ goal.T)


def contrastive_losses(logits: jax.Array, penalty: Any) -> jax.Array:
    """InfoNCE both ways: which goal is a pair's, and which pair a goal's (arXiv 1807.03748, 2408.11052).

    Args:
      logits: of pairs of a state and an action (rows) and goals (columns); those on the diagonal belong together. `[B, B]`
      penalty: the weight of the squared logarithms of the rows' sums.

    Returns:
      The loss of each pair. `[B]`
    """
    own, of_pair, of_goal = jnp.diagonal(logits), *(jax.nn.logsumexp(logits, axis) for axis in (1, 0))
    return of_pair + of_goal - 2 * own + penalty * of_pair**2


@config("contrastive_rl")
class ContrastiveRL:
    """Contrastive reinforcement learning; for environments with goals, and actions that are bounded floats."""

    num_envs: int = field(default=16, doc="environments stepped in parallel, `E`. Usual: 16 to 1024.")
    unroll_length: int = field(default=2, doc="steps of every environment per iteration, `T`. Usual: 1 to 64.")
    discount: float = tunable(default=0.99, above=0, high=1, doc="goals `k` steps later weigh `discount**k`. Usual: 0.99.")
    num_updates: int = field(default=16, doc="updates per iteration, `K`. Usual: 1/16 to 1 per environment step.")
    batch_size: int = field(default=256, low=2, doc="pairs, and goals, per update, `B`. Usual: 256 to 1024.")
    replay: Replay = field(default=Replay(200_000), doc="the buffer. Usual: 1e4 to 1e6 steps.")
    learning_rate: float = tunable(default=0.003, above=0, doc="step size of Adam. Usual: 3e-4 to 3e-3.")
    hidden_sizes: tuple[int, ...] = field(default=(256, 256), doc="widths of dense layers. Usual: (256, 256).")
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    representation_size: int = field(default=64, doc="numbers that represent a pair, or a goal, `R`. Usual: 64.")
    penalty: float = tunable(default=0.1, low=0, doc="weight of the squared logarithms of sums. Usual: 0.1.")
    other_goals: float = tunable(default=1.0, low=0, high=1, doc="share of the actor's goals from other pairs. Usual: 0.5, 1.")
    initial_temperature: float = tunable(default=1.0, above=0, once=True, doc="first weight of the entropy. Usual: 0.1 to 1.")

    # Other fields that the package reads.
    hindsight = Hindsight(1.0, by="geometric")
    network, activation = "auto", "relu"
    optimizer, anneal_learning_rate, max_grad_norm = "adam", False, None

    def build(self, env: Any) -> Agent:
        """Builds the agent; raises TypeError or ValueError without goals or action bounds."""
        goals, action_space = goals_of(env), check_bounded("contrastive_rl", env.action_space)
        action_size = math.prod(action_space.shape)
        venv = envs.EpisodeStatistics(envs.vectorize(env, self.num_envs))
        buffer = n_step_buffer(env, self)
        optimizer = for_each_network(make_optimizer(self, epsilon=1e-8))
        to_env_action = action_transform(action_space)
        spaces = env.observation_space.spaces
        policy = tanh_policy(env.observation_space, action_space, self)

        def encoder(space: Any) -> Network:
            return linear_network("critic", space, self, num_outputs=self.representation_size, scale=1.0)

        of_pair, of_goal = encoder(spaces["observation"]), encoder(spaces["desired_goal"])

        def represent(critic: Any, obs: Any, action: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Representations of pairs and of goals. `[B, R]` each"""
            pair = of_pair.apply(critic["pair"], obs["observation"], action)
            return pair, of_goal.apply(critic["goal"], goals.desired(obs))

        @msrl.fragment(role="learner")
        def gradients(params: Any, batch: Batch):
            obs, action = batch.experience.obs, batch.experience.action  # its goals were achieved later
            temperature = jnp.exp(params["log_temperature"])
            which, acting = jax.random.split(batch.key)
            others = jax.random.uniform(which, (self.batch_size,)) < self.other_goals
            others = jax.tree.map(lambda x: jax.vmap(jnp.where)(others, jnp.roll(x, 1, 0), x), goals.desired(obs))
            wanted = goals.replace(obs, others)

            # Gradients flow through `trained` only; the actor's loss takes the critic of `params` as a constant.
            def loss(trained: Any):
                pair, goal = represent(trained["critic"], obs, action)
                logits = all_energies(pair, goal)  # wherever they lie
                losses = contrastive_losses(logits, self.penalty)
                new_action, log_prob = policy.apply(trained["actor"], wanted).sample_and_log_prob(
                    jax.random.split(acting, self.batch_size)
                )
                pair, goal = represent(params["critic"], wanted, new_action)
                value = energies(jnp.sum((pair - goal) ** 2, -1))
                soft = soft_value(value, log_prob, temperature)
                total = losses.mean() - soft.mean()
                total += temperature_loss(trained["log_temperature"], log_prob, -0.5 * action_size).mean()
                stats = {
                    "critic_loss": losses.mean(),
                    "accuracy": (logits.argmax(1) == jnp.arange(self.batch_size)).mean(),
                    "actor_loss": -soft.mean(),
                    "entropy": -log_prob.mean(),
                    "temperature": temperature,
                }
                return total, (losses, stats)

            return jax.grad(loss, has_aux=True)(params)

        @msrl.fragment(role="actor")
        def draw_keys(keys, progress):
            return *split_keys(keys, self.unroll_length), steps_before(self, progress)

        @msrl.fragment(role="actor")
        def explore(params, obs, keys, steps):
            explored = policy.apply(params["actor"], obs).sample(keys)
            return jnp.where(at_least(steps, self.replay.learning_starts), explored, uniform_actions(keys, action_space))

        @msrl.fragment(role="env")
        def env_step(env_state, action):
            return venv.step(env_state, to_env_action(action))

        @msrl.fragment(role="env")
        def pop_episodes(env_state):
            return venv.pop_episodes(env_state)

        @msrl.fragment(role="buffer")
        def insert(replay, pending, items):
            return buffer.insert(buffer.update(replay, pending.indices, pending.td_error), items)

        @msrl.fragment(role="buffer")
        def sample_batches(replay, key, data, progress):
            return draw(buffer, replay, key, data, progress, self.num_updates)

        @msrl.fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate, ready):
            return apply_if(ready, optimizer, params, opt_state, grads, learning_rate)

        @msrl.fragment(role="learner")
        def learn(learner, progress, key, sample, ready):
            def update(learner, batch):
                grads, (td_error, stats) = gradients(learner.params, batch)
                learning_rate = learning_rate_at(self, progress)
                params, opt_state = apply_update(learner.params, learner.opt_state, grads, learning_rate, ready)
                return Learner(params, (), opt_state), td_error, stats

            return learn_from(sample, ready, update, learner, key, progress)

        def iteration(state, progress):
            def step(before, inputs):
                env_state, obs = before
                action = explore(state.params, obs, *inputs)
                env_state, t = env_step(env_state, action)
                item = Transition(obs, action, t.reward, t.terminated, t.truncated, t.final_obs, valid=t.valid)
                return (env_state, t.obs), item

            actor_keys, *inputs = draw_keys(state.actor_keys, progress)
            (env_state, obs), items = jax.lax.scan(step, (state.env_state, state.obs), tuple(inputs))
            env_state, episodes = pop_episodes(env_state)
            replay = insert(state.replay, state.pending, items)
            replay_key, sample, ready, report = sample_batches(replay, state.replay_key, state.data, progress)
            learner, key, pending, metrics = learn(state.learner, progress, state.key, sample, ready)
            after = OffPolicyState(*learner, key, (), actor_keys, replay, replay_key, pending, (), (), env_state, obs)
            return after, {**metrics, **report, **episodes}

        def init(key):
            params_key, env_key, *keys = jax.random.split(key, 5)
            env_state, obs = venv.reset(env_key)
            actor_key, pair_key, goal_key = jax.random.split(params_key, 3)
            pair = obs["observation"], jnp.zeros((self.num_envs, action_size))
            params = {
                "actor": policy.init(actor_key, obs),
                "critic": {"pair": of_pair.init(pair_key, *pair), "goal": of_goal.init(goal_key, goals.desired(obs))},
                "log_temperature": jnp.log(jnp.float32(self.initial_temperature)),
            }
            begun = initial_state(self, buffer, Learner(params, (), optimizer.init(params)), *keys)
            return begun._replace(env_state=env_state, obs=obs)

        def act(state, obs, key, carry):
            return to_env_action(choose(policy.apply(state.params["actor"], obs), key)), carry

        return Agent(
            init=init,
            iteration=iteration,
            act=act,
            axes=state_axes(buffer, env_state=venv.axes, obs=P("env")),
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=self.num_updates,
            learning_starts=buffer.min_size,
            env=venv,
        )


SIZES: Any = {"hidden_sizes": (64, 64), "batch_size": 256}
ALGORITHMS = {
    "contrastive RL": ContrastiveRL(**SIZES),
    "SAC with HER": SAC(tau=0.02, hindsight=Hindsight(0.8), **SIZES),
    "SAC": SAC(tau=0.02, **SIZES),
}


def train(task: Task, name: str, seeds: int, **given: Any) -> msrl.Result:
    """Trains one of `ALGORITHMS` in a maze on some seeds, without a display."""
    rate = task.learning_rates[list(ALGORITHMS).index(name)]
    given = {"total_steps": task.steps, "chunk": 1 + task.steps // 3200, "eval_episodes": 0, "progress": False} | given
    return msrl.train(ALGORITHMS[name], task.maze, seeds=seeds, learning_rate=rate, **given)


def in_training(result: msrl.Result, begin: float = 0.9, end: float = 1.0) -> np.ndarray:
    """The shares of the episodes between two fractions of the run that reach their goals. `[seeds]`"""
    done = result.history["step"] / result.history["step"][-1]
    shares = result.history["episode_success"].reshape(len(done), -1)
    return np.nanmean(shares[(done > begin) & (done <= end)], 0)


def of_greedy(result: msrl.Result, seeds: int, episodes: int) -> np.ndarray:
    """The shares of new episodes that reach their goals if the most probable actions are taken. `[seeds]`"""
    found = [result.evaluate(episodes, seed=1000, member=member).metrics["success"] for member in range(seeds)]
    return np.array([np.mean(x) for x in found])


def figure(runs: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]) -> str:
    """Draws what shares of episodes reach their goals in training, by task and algorithm, with 95% intervals of the means.

    The values are steps `[C]` and shares `[C, seeds]`.
    """
    with curves.styled():
        drawn, panels = curves.figure_of(len(runs))
        for panel, (task, by_algorithm) in zip(panels, runs.items(), strict=True):
            for number, (name, (steps, shares)) in enumerate(by_algorithm.items()):
                curves.draw_curve(panel, name, number, *curves.mean_curve(steps, shares))
            panel.set(title=task, xlabel="environment steps", ylabel="episodes that reach their goal", ylim=(0, 1.02))
        return curves.svg_of(curves.finished(drawn))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains all algorithms on all seeds, and prints how many goals they reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=argument_types.positive_int, default=5, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--episodes", type=argument_types.positive_int, default=200, help="that each agent plays afterwards")
    parser.add_argument("--policy", default="GPUOnly")
    parser.add_argument("--cpu-devices", type=argument_types.cpu_devices)
    parser.add_argument("--svg", type=argument_types.new_file, help="file for a figure")
    args = parser.parse_args(arguments)
    runs: dict[str, dict[str, Any]] = {task: {} for task in args.tasks}
    for task in args.tasks:
        for name in ALGORITHMS:
            result = train(TASKS[task], name, args.seeds, policy=args.policy)
            runs[task][name] = result.history["step"], result.history["episode_success"]
            greedy = of_greedy(result, args.seeds, args.episodes)
            found = {"from 30% to 50%": in_training(result, 0.3, 0.5), "the last tenth": in_training(result), "greedy": greedy}
            for how, shares in found.items():
                print(f"{task}, {name}, {how}: {shares.mean():.2f}, on each seed", *shares.round(2), flush=True)
    if args.svg:
        args.svg.write_text(figure(runs))


if __name__ == "__main__":
    main()
