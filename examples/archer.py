"""ArCHer (Zhou et al., 2024, arXiv 2402.19446): a policy of tokens learns from critics of whole utterances.

    python -m examples.archer --svg docs/example_archer.svg
    python -m examples.archer --methods archer --policy examples.archer:Apart --cpu-devices 8

A transformer plays `examples/twenty_questions.py` token by token. Critics of utterances, fragments with the role
`"learner:critic"`, learn from all dialogues so far; a policy gradient of tokens, `"learner:actor"`, takes their advantages. In
the shape descriptions, `E` new dialogues, of which a batch has `B`, have `H` turns, each with an utterance of `U` tokens.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from examples import twenty_questions as game
from examples.twenty_questions import UTTERANCE, Dialogues, TwentyQuestions
from msrl_jax import envs, replay
from msrl_jax.agents.agent import split_keys
from msrl_jax.algorithms import Agent, config, field, tunable
from msrl_jax.cli import argument_types
from msrl_jax.fragments.counters import at_least
from msrl_jax.loops.off_policy import select
from msrl_jax.losses import clipped_surrogate_loss, value_loss
from msrl_jax.policies import Layout, Placement
from msrl_jax.report import curves
from msrl_jax.returns.advantages import gae
from msrl_jax.returns.means import mean, standardize

ENV = TwentyQuestions(turns=10)
NAMES = {"archer": "ArCHer", "cloning": "filtered cloning", "ppo": "PPO of tokens"}
BASELINE: dict[str, Any] = {"critic_updates": 4, "actor_updates": 4, "warmup": 0}
SETTINGS = {"archer": {}, "cloning": BASELINE | {"critic_updates": 0}, "ppo": BASELINE}
ITERATIONS, TOKENS = 40, ENV.turns * (UTTERANCE + 1)  # tokens of a dialogue
CAPACITY, SHARE = 100_000, 10  # dialogues that are kept; filtered cloning takes the best of so many


def utterance_targets(own: jax.Array, proposed: jax.Array, dialogues: Dialogues, discount: Any) -> jax.Array:
    """The targets of ArCHer's critics `[..., H, U + 1, 4]`, by outputs of target networks (eq. 1 and 2 of the paper).

    Outputs are Q1, Q2, V1, V2. That of a Q is the reward and the V of the next turn, that of a V the Q of a proposal. A V is
    read before an utterance, a Q at its end; elsewhere targets are nan, and outputs mean nothing.
    """
    after = jnp.where(dialogues.counts[..., None], own[..., 0, 2:], 0.0)
    after = jnp.concatenate([after[..., 1:, :], jnp.zeros_like(after[..., :1, :])], -2)
    q = dialogues.reward[..., None] + discount * after
    return jnp.full_like(own, jnp.nan).at[..., -1, :2].set(q).at[..., 0, 2:].set(proposed[..., -1, :2])


def token_advantages(own: jax.Array, dialogues: Dialogues, discount: Any, gae_lambda: Any) -> jax.Array:
    """PPO's advantages, of which tokens are the steps; the value before each is the first output. `[..., H, U]`"""
    in_time = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-2], -1), -1, 0)
    value = own[..., :-1, 0]
    reward = jnp.concatenate([jnp.zeros_like(value[..., 1:]), dialogues.reward[..., None]], -1)
    reward, values, counts = map(in_time, (reward, value, jnp.broadcast_to(dialogues.counts[..., None], value.shape)))
    last = ~jnp.concatenate([counts[1:], jnp.zeros_like(counts[:1])])
    found = gae(reward, values, jnp.roll(values, -1, 0), last, last, counts, discount=discount, gae_lambda=gae_lambda)
    return jnp.moveaxis(found, 0, -1).reshape(value.shape)


def value_error(own: jax.Array, target: jax.Array, counts: jax.Array) -> jax.Array:
    """The mean over turns that count of all squared errors where there is a target. `[]`"""
    known = ~jnp.isnan(target)
    return mean(jnp.where(known, value_loss(own, jnp.where(known, target, 0.0)), 0.0).sum((-1, -2)), counts)


class State(NamedTuple):
    """The state of a run."""

    params: Any  # of the actor and of the critic, as of `opt_state`
    target_params: Any  # of the critic
    opt_state: Any
    buffer: Any
    keys: Any  # one for each dialogue, [E]
    key: Any
    env_state: Any = ()  # dialogues restart in every iteration


@config("archer")
class ArCHer:
    """ArCHer, filtered cloning, or PPO of tokens, for `TwentyQuestions`; all begin with a clone of the simple questioner."""

    method: Literal["archer", "cloning", "ppo"] = field(default="archer", doc="how the actor learns. Usual: archer.")
    num_envs: int = field(default=64, doc="dialogues per iteration, `E`. Usual: 128.")
    batch_size: int = field(default=32, doc="dialogues of an update, `B`; PPO takes all new ones. Usual: 32.")
    cloning_steps: int = field(default=2500, low=0, doc="updates in which it learns to talk, before the run. Usual: 2500.")
    warmup: int = field(default=5, low=0, doc="first iterations, in which only critics learn. Usual: 5 to 20.")
    critic_updates: int = field(default=12, low=0, doc="per iteration. Usual: 12 to 50.")
    actor_updates: int = field(default=3, doc="per iteration. Usual: 3.")
    critic_rate: float = tunable(default=1e-3, above=0, doc="step size of Adam for critics. Usual: 1e-5 to 1e-3.")
    actor_rate: float = tunable(default=2e-4, above=0, doc="step size of Adam for actors. Usual: 1e-6 to 3e-4.")
    discount: float = tunable(default=0.95, low=0, high=1, doc="discount factor per turn. Usual: 0.95.")
    tau: float = tunable(default=0.1, above=0, high=1, doc="by how much of the way target networks follow. Usual: 0.1.")
    size: int = field(default=64, doc="width of both transformers, a multiple of their 4 heads. Usual: 64 to 768.")
    layers: int = field(default=2, doc="layers of each. Usual: 2 to 12.")

    def build(self, env):  # noqa: D102
        if not isinstance(env, TwentyQuestions) or self.size % 4:
            raise ValueError(f"archer plays TwentyQuestions with size a multiple of 4; not {type(env).__name__}, {self.size}")
        turns, length, tokens = env.turns, env.turns * (UTTERANCE + 1), len(env.tables[0])
        make: Any = functools.partial(game.Transformer, self.size, self.layers, tokens, length)
        actor_net, critic_net = make(tokens), make(4)
        is_archer, rates = self.method == "archer", {"actor": self.actor_rate, "critic": self.critic_rate}
        optimizers = {name: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)) for name, rate in rates.items()}
        sizes: Any = {"capacity": CAPACITY, "num_envs": self.num_envs, "batch_size": self.batch_size, "unroll_length": 1}
        buffer = replay.uniform(jax.eval_shape(functools.partial(game.simple_dialogue, env), jax.random.key(0)), **sizes)
        n, updates = self.critic_updates, self.critic_updates + self.actor_updates
        talking, lower = game.cloned(env, actor_net, self.cloning_steps), functools.partial(jnp.min, axis=-1)
        of_tokens = functools.partial(token_advantages, discount=self.discount ** (1 / UTTERANCE), gae_lambda=0.95)
        utter, silence = functools.partial(game.utter, actor_net), functools.partial(game.silence, actor_net)
        speak = msrl.fragment(role="actor", name="speak")(jax.vmap(utter, (None, 0, 0, 0)))

        def act(state, obs, key=None, memory=()):
            keys = None if key is None else jax.random.split(key, len(obs))
            return jax.vmap(utter, (None, 0, 0, None if key is None else 0))(state.params["actor"], obs, memory, keys)

        @msrl.fragment(role="env")
        def begin(keys):
            keys, now = split_keys(keys, length + 1)
            return keys, now[1:], (*jax.vmap(env.reset)(now[0]), jnp.ones(self.num_envs, bool))

        @msrl.fragment(role="env")
        def listen(keys, env_state, counts, action):
            env_state, obs, reward, over, _ = jax.vmap(env.step)(keys, env_state, action)
            return (env_state, obs, counts & ~over), jnp.where(counts, reward, 0.0)

        @msrl.fragment(role="actor")
        def gather(*steps):
            obs, counts, reward = (jnp.moveaxis(x.reshape(turns, UTTERANCE + 1, self.num_envs), -1, 0) for x in steps)
            return Dialogues(obs, counts[..., 0], reward.sum(-1)), msrl.Mean(reward.sum(), jnp.float32(self.num_envs))

        @msrl.fragment(role="buffer")
        def remember(state, dialogues, key):  # and batches for the updates, [K, B, ...]
            state = buffer.insert(state, jax.tree.map(lambda x: x[None], dialogues))
            key, *keys = jax.random.split(key, 1 + updates * (SHARE if self.method == "cloning" else 1))
            drawn = jax.vmap(lambda key: buffer.sample(state, key).experience)(jnp.stack(keys))
            if self.method == "cloning":
                drawn = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), drawn)
                best = jax.lax.top_k(drawn.reward.sum(-1), updates * self.batch_size)[1]
                drawn = jax.tree.map(lambda x: x[best.reshape(self.batch_size, updates).T], drawn)
            elif self.method == "ppo":
                drawn = jax.tree.map(lambda x: jnp.broadcast_to(x, (updates, *x.shape)), dialogues)
            drawn = drawn, jnp.stack(keys[:updates])
            return state, key, *(jax.tree.map(lambda x, part=part: x[part], drawn) for part in (slice(n), slice(n, None)))

        @msrl.fragment(role="learner:actor")
        def propose(params, turns, keys):
            return jax.vmap(functools.partial(game.proposals, actor_net, params))(turns, keys)

        @msrl.fragment(role="learner:critic")
        def critic_gradients(params, target_params, dialogues, others):
            own, proposed = game.read(critic_net, target_params, dialogues.turns, others)
            if is_archer:
                target = utterance_targets(own, proposed, dialogues, self.discount)
            else:
                target = jnp.full_like(own, jnp.nan).at[..., :-1, 0].set(own[..., :-1, 0] + of_tokens(own, dialogues))
            loss = lambda p: value_error(game.read(critic_net, p, dialogues.turns)[0], target, dialogues.counts)
            return jax.value_and_grad(loss)(params)

        @msrl.fragment(role="learner:critic")
        def judge(params, dialogues, others):  # advantages of tokens, [B, H, U], or one for all of an utterance, [B, H, 1]
            own, proposed = game.read(critic_net, params, dialogues.turns, others)
            found = of_tokens(own, dialogues) if not is_archer else lower(proposed[..., -1:, :2]) - lower(own[..., :1, 2:])
            return standardize(found, jnp.broadcast_to(dialogues.counts[..., None], found.shape))

        @msrl.fragment(role="learner:actor")
        def actor_gradients(params, old_params, dialogues, others, advantage):
            def loss(params):
                log_prob = game.log_probs(actor_net, params, dialogues.turns, others)
                old = game.log_probs(actor_net, old_params, dialogues.turns) if self.method == "ppo" else log_prob
                of_token = jnp.broadcast_to(advantage, log_prob.shape)
                losses = clipped_surrogate_loss(log_prob - jax.lax.stop_gradient(old), of_token, 0.2)
                return mean(losses.sum(-1), dialogues.counts)  # if nothing is old, the policy gradient

            return jax.grad(loss)(params)

        @msrl.fragment(role="server:critic")
        def update_critic(params, target_params, opt_state, grads):
            updates, opt_state = optimizers["critic"].update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            return params, optax.incremental_update(params, target_params, self.tau if is_archer else 0.0), opt_state

        @msrl.fragment(role="server:actor")
        def update_actor(params, opt_state, grads, ready):
            updates, new = optimizers["actor"].update(grads, opt_state, params)
            return select(ready, (optax.apply_updates(params, updates), new), (params, opt_state))

        def iteration(state, progress):
            keys, now, start = begin(state.keys)
            params, opt_state, ready = state.params, state.opt_state, at_least(progress.times(1), self.warmup)

            def token(carry, keys):
                (env_state, obs, counts), memory = carry
                action, memory = speak(params["actor"], obs, memory, keys)
                heard, reward = listen(keys, env_state, counts, action)
                return (heard, memory), (obs, counts, reward)

            dialogues, returned = gather(*jax.lax.scan(token, (start, silence(self.num_envs)), now)[1])
            held, key, (batches, draws), of_actor = remember(state.buffer, dialogues, state.key)

            def critic_step(carry: Any, batch: Any):
                loss, grads = critic_gradients(carry[0], carry[1], *batch)
                return update_critic(carry[0], carry[1], carry[2], grads), loss

            batches = batches, propose(params["actor"], batches.turns, draws) if is_archer else None
            critic = params["critic"], state.target_params, opt_state["critic"]
            (critic, target, critic_opt), losses = jax.lax.scan(critic_step, critic, batches)

            def actor_step(carry: Any, batch: Any):
                (actor, opt_state), (dialogues, draw) = carry, batch
                others = propose(actor, dialogues.turns[None], draw[None])[0] if is_archer else None
                values = critic if is_archer else target  # those before the updates in PPO
                advantage = 1.0 if self.method == "cloning" else judge(values, dialogues, others)
                grads = actor_gradients(actor, params["actor"], dialogues, others, advantage)
                return update_actor(actor, opt_state, grads, ready), ()

            (actor, actor_opt), _ = jax.lax.scan(actor_step, (params["actor"], opt_state["actor"]), of_actor)
            params, opt_state = {"actor": actor, "critic": critic}, {"actor": actor_opt, "critic": critic_opt}
            metrics = {"episode_return": returned, "critic_loss": losses.mean() if n else 0.0}
            return State(params, critic if self.method == "ppo" else target, opt_state, held, keys, key), metrics

        def init(key):
            critic_key, env_key, key = jax.random.split(key, 3)
            out = critic_net.init(critic_key, *game.nothing(length))["params"]["out"]
            params = {"actor": talking, "critic": {"params": talking["params"] | {"out": out}}}  # it can read already
            params, target_params = (jax.tree.map(jnp.array, x) for x in (params, params["critic"]))
            opt_state = {name: optimizers[name].init(params[name]) for name in rates}
            return State(params, target_params, opt_state, buffer.init(), jax.random.split(env_key, self.num_envs), key)

        return Agent(
            init=init,
            iteration=iteration,
            act=act,
            initial_carry=silence,
            env=envs.vectorize(env, self.num_envs),
            axes=State(P(), P(), P(), buffer.axes, P("env"), P(), P()),
            updates_per_iteration=updates,
            steps_per_iteration=self.num_envs * length,
        )


@dataclasses.dataclass(frozen=True)
class Apart:
    """Actors, the actor's learner and the critics' learner on separate devices."""

    def layout(self, devices, sizes):  # noqa: D102
        if len(devices) < 3:
            raise ValueError(f"Apart() needs 3 devices, for actors and two learners, and there are {len(devices)}")
        count = max(n for n in range(1, len(devices) - 1) if sizes["env"] % n == 0)
        actors, learner = Placement.over("actors", devices[:count]), Placement.over("learner", devices[-2:-1])
        roles = {"env": actors, "actor": actors, "learner": learner, "server": learner}
        roles |= dict.fromkeys(("learner:critic", "server:critic"), Placement.over("critics", devices[-1:]))
        return Layout(roles, policy="Apart()")


def train(method: Any, seeds: int, iterations: int = ITERATIONS, **given: Any) -> msrl.Result:
    """Trains by one of the methods on some seeds, without a display."""
    given = {"total_steps": iterations * ArCHer.num_envs * TOKENS, "chunk": 1, "eval_episodes": 0, "progress": False} | given
    return msrl.train(ArCHer(method=method, **SETTINGS[method]), ENV, seeds=seeds, **given)


def in_the_end(returns: np.ndarray) -> np.ndarray:
    """The means of the last fifth of the returns of a run. `[seeds]`"""
    return returns[int(len(returns) * 0.8) :].reshape(-1, returns[0].size).mean(0)


def figure(runs: dict[str, msrl.Result]) -> str:
    """Draws the returns in training over the number of dialogues, with 95% intervals of the means over seeds."""
    with curves.styled():
        drawn, (panel,) = curves.figure_of(1)
        for number, (name, of) in enumerate((name, result.history) for name, result in runs.items()):
            curves.draw_curve(panel, NAMES[name], number, *curves.mean_curve(of["step"] / TOKENS, of["episode_return"]))
        panel.set(xlabel="dialogues", ylabel="return")
        return curves.svg_of(curves.finished(drawn))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains by each method on all seeds, and prints the returns in the last fifth of the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", choices=NAMES, nargs="+", default=list(NAMES))
    parser.add_argument("--seeds", type=argument_types.positive_int, default=3)
    parser.add_argument("--policy", default="GPUOnly")
    parser.add_argument("--cpu-devices", type=argument_types.cpu_devices)
    parser.add_argument("--svg", type=argument_types.new_file, help="file for a figure")
    args = parser.parse_args(arguments)
    if args.policy != "auto":  # cloning takes minutes, so devices are counted before it
        msrl.policies.get(args.policy).layout(jax.devices(), {"env": ArCHer.num_envs})
    runs = {}
    for method in args.methods:
        runs[method] = train(method, args.seeds, policy=args.policy)
        found = in_the_end(runs[method].history["episode_return"])
        print(f"{NAMES[method]}: {found.mean():.2f}, on each seed", *found.round(2), flush=True)
    if args.svg:
        args.svg.write_text(figure(runs))


if __name__ == "__main__":
    main()
