"""A team that learns off-policy: it acts as one agent with joint observations, and learns from replayed joint steps.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments and `A` the number of agents of
the team.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.agent import Metrics, Progress
from msrl_jax.algorithms.loops.agents import Experience, Now, Team
from msrl_jax.algorithms.loops.off_policy import Explore, OffPolicyState, Rule, replaying
from msrl_jax.algorithms.networks.layers import forget
from msrl_jax.envs import TeamView
from msrl_jax.fragments import fragment
from msrl_jax.replay import Replay, Transition


def off_policy_team(
    config: Any, view: TeamView, buffer: Replay, rule: Rule, explore: Explore, *, rewards: Literal["summed", "each"] = "summed"
) -> Team:
    """Makes a team that learns from joint `Transition`s; rewards are "summed", with one end, or "each" agent's own, `[A]`."""
    replayer = replaying(config, buffer, rule, view.num_envs)

    def init(params_key: jax.Array, actor_key: jax.Array, learner_key: jax.Array) -> tuple[Any, OffPolicyState]:
        learner_key, replay_key = jax.random.split(learner_key)
        obs = jax.tree.map(lambda x: jnp.zeros((view.num_envs, *x.shape), x.dtype), view.observation_type)
        begun = replayer.init(params_key, actor_key, learner_key, replay_key, obs)
        return begun.params, begun._replace(params=())

    def begin(params: Any, rest: OffPolicyState, progress: Progress) -> tuple[Any, OffPolicyState, Any]:
        acting, begun, keys = replayer.begin(rest._replace(params=params), progress)
        return acting, begun._replace(params=()), keys

    @fragment(role="actor", name="explore")
    def act_jointly(params, obs, is_first, keys, steps, carry):
        carry = forget(is_first, carry)
        action, next_carry = explore(params, view.observe(obs), keys, steps, carry)
        return action, carry, next_carry

    def act(acting: Any, now: Now, carry: Any, keys: Any) -> tuple[jax.Array, Any, Any]:
        step_keys, steps = keys
        return act_jointly(acting, now.obs, now.is_first, step_keys, steps, carry)

    @fragment(role="env")
    def of_team(reward, terminated, truncated):
        if rewards == "summed":
            return reward.sum(-1), terminated.all(-1), truncated
        return reward, terminated, jnp.broadcast_to(truncated[..., None], terminated.shape)

    def learn(
        params: Any, rest: OffPolicyState, experience: Experience, now: Now, carry: Any, progress: Progress
    ) -> tuple[Any, OffPolicyState, Metrics]:
        t = experience
        items = Transition(
            view.join(t.obs, t.state, t.present),
            t.action,
            *of_team(t.reward, t.terminated, t.truncated),
            view.join(t.final_obs, t.final_state, ~t.terminated),
            t.extras,
        )
        done, metrics = replayer.finish(rest._replace(params=params), items, progress)
        return done.params, done._replace(params=()), metrics

    def choose_action(params: Any, rest: OffPolicyState, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
        return rule.choose_action(params, view.observe(obs), key, carry)

    axes = OffPolicyState(**{**replayer.axes, "params": ()})
    return Team(
        init=init,
        axes=(replayer.axes["params"], axes),
        begin=begin,
        act=act,
        learn=learn,
        choose_action=choose_action,
        initial_carry=rule.initial_carry,
        updates_per_iteration=config.num_updates,
        learning_starts=buffer.min_size,
        agent_axes=P("env"),
    )
