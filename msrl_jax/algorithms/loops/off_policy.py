"""The loop of the off-policy algorithms for one agent; `loops/replaying.py` has what it does besides stepping environments."""

from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.base import Agent, Metrics, logical_axes
from msrl_jax.algorithms.loops.replaying import Explore, Pending, Replayer, Rule, replaying
from msrl_jax.algorithms.loops.unrolling import unroll
from msrl_jax.algorithms.networks.actions import action_transform
from msrl_jax.algorithms.networks.cores import Carry, forget
from msrl_jax.counters import Counter
from msrl_jax.envs import VectorEnvironment
from msrl_jax.fragments import fragment
from msrl_jax.replay import Replay, ReplayState, Transition


class OffPolicyState(NamedTuple):
    """The state of a run.

    Attributes:
      params: parameters of all trained networks.
      target_params: parameters of the target networks.
      opt_state: states of the optimizers.
      iteration: iterations done, counted by the learner. shape=()
      updates: updates done, as in `Progress`. shape=()
      key: the learner's key. shape=()
      acting_params: the acting parameters, and the learner's iteration at their last refresh; `()` if the newest parameters
        always act.
      steps: environment steps taken, counted by the actors. shape=()
      actor_keys: one key per environment, which samples actions. shape=(E,)
      carry: the recurrent state of the actors, zeros at the start of an episode; `()` without one. shape=(E, ...)
      env_state: state of the vector environment.
      obs: the observations for the next actions. shape=(E, ...)
      replay: state of the buffer.
      replay_key: the buffer's key, for draws. shape=()
      pending: TD errors for the buffer.
      data: `Replay.data` of a buffer that mixes in a data set; `()` without one.
    """

    params: Any
    target_params: Any
    opt_state: Any
    iteration: Counter
    updates: Counter
    key: jax.Array
    acting_params: tuple[Any, Counter] | tuple[()]
    steps: Counter
    actor_keys: jax.Array
    carry: Carry
    env_state: Any
    obs: jax.Array
    replay: ReplayState
    replay_key: jax.Array
    pending: Pending
    data: Any


def off_policy_agent(
    venv: VectorEnvironment,
    buffer: Replay,
    rule: Rule,
    explore: Explore,
    *,
    unroll_length: int,
    num_updates: int,
    refresh_period: int = 1,
    env_groups: int = 1,
) -> Agent:
    """Builds an agent that learns from a replay buffer.

    Args:
      venv: the vector environment.
      buffer: the buffer, of items like `Transition`.
      rule: what the agent learns from a batch.
      explore: chooses actions in training.
      unroll_length: steps of every environment per iteration, `T`.
      num_updates: updates per iteration, `K`.
      refresh_period: iterations between two refreshes of the acting parameters.
      env_groups: groups of environments that take turns.

    Returns:
      The agent. Its metrics are the statistics of the rule, as `Mean`s over the updates (without samples until the buffer is
      ready); `parameter_age`, the age of the acting parameters in iterations; and the report of the buffer.
    """
    num_envs, to_env_action = venv.num_envs, action_transform(venv.action_space)
    replayer = replaying(
        buffer,
        rule,
        num_envs=num_envs,
        unroll_length=unroll_length,
        num_updates=num_updates,
        refresh_period=refresh_period,
    )

    def init(key: jax.Array) -> OffPolicyState:
        params_key, env_key, actor_key, learner_key, replay_key = jax.random.split(key, 5)
        env_state, obs = venv.reset(env_key)
        begun = replayer.init(params_key, actor_key, learner_key, replay_key, obs)
        carry = rule.initial_carry(num_envs) if rule.initial_carry else ()
        return OffPolicyState(**begun._asdict(), carry=carry, env_state=env_state, obs=obs)

    act: Any = fragment(role="actor", name="explore")(explore)

    @fragment(role="env")
    def env_step(env_state, action):
        return venv.step(env_state, to_env_action(action))

    pop_episodes = fragment(role="env", name="pop_episodes")(venv.pop_episodes)

    def iteration(state: OffPolicyState) -> tuple[OffPolicyState, Metrics]:
        acting_params, begun, keys = replayer.begin(Replayer(*(getattr(state, name) for name in Replayer._fields)))

        def step(loop, inputs):
            env_state, obs, carry = loop
            action, next_carry = act(acting_params, obs, *inputs, carry)
            env_state, t = env_step(env_state, action)
            item = Transition(obs, action, t.reward, t.terminated, t.truncated, t.final_obs, carry, t.present)
            return (env_state, t.obs, forget(t.terminated | t.truncated, next_carry)), item

        (env_state, obs, carry), items = unroll(
            step, (state.env_state, state.obs, state.carry), keys,
            axes=(venv.axes, P("env"), P("env")), input_axes=(P(None, "env"), P()), groups=env_groups,
        )  # fmt: skip
        env_state, episodes = pop_episodes(env_state)
        done, metrics = replayer.finish(begun, items)
        return OffPolicyState(**done._asdict(), carry=carry, env_state=env_state, obs=obs), {**metrics, **episodes}

    def act_in_env(state: OffPolicyState, obs: jax.Array, key: jax.Array | None, carry: Carry = ()) -> Any:
        action, carry = rule.choose_action(state.params, obs, key, carry)
        return (to_env_action(action), carry) if rule.initial_carry else to_env_action(action)

    axes = logical_axes(OffPolicyState, **replayer.axes, carry=P("env"), env_state=venv.axes, obs=P("env"))
    return Agent(
        init=init,
        iteration=iteration,
        act=act_in_env,
        axes=axes,
        steps_per_iteration=num_envs * unroll_length,
        updates_per_iteration=num_updates,
        env=venv,
        initial_carry=rule.initial_carry,
        env_group=env_groups,
        data={"data": buffer.data} if buffer.data else {},
    )
