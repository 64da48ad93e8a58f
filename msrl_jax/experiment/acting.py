"""Acting outside the training loop: a trained state on one device, for evaluation and for use."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.algorithms.agent import Agent, innermost
from msrl_jax.envs import Environment, MaskedObservation
from msrl_jax.envs.base import env_name
from msrl_jax.envs.masks import mask_of, observation_type
from msrl_jax.envs.params import GivenParams, ParamSource, RandomizeParams, find_source, in_source, randomized
from msrl_jax.experiment import processes
from msrl_jax.fragments.placement import Device


@dataclasses.dataclass(frozen=True)
class Behavior:
    """The behavior of an agent on raw observations.

    A state may be large (replay buffers) and on several meshes, but acting needs only a small part. `take` copies this part
    to one device, and `act` computes from it.

    Attributes:
      agent: the agent of one run.
      env: the environment of the agent.
      follows: whether parameters of the environment that are data are drawn as a state says, or as `env` does.
    """

    agent: Agent
    env: Environment
    follows: bool = True

    def elsewhere(self, env_params: GivenParams) -> "Behavior":
        """The same behavior where parameters of the environment are drawn from something else; the defaults if it is empty."""
        env = self.env.env if isinstance(self.env, RandomizeParams) else self.env
        return dataclasses.replace(self, env=randomized(env, env_params), follows=False)

    def source(self, state: Any) -> ParamSource | tuple[()]:
        """What a state of one run draws the parameters of its environments from now; `()` for what `env` draws them from."""
        return jax.tree.map(lambda x: x[0], find_source(state)) if self.follows else ()

    def act(self, state: Any, obs: Any, key: jax.Array | None = None) -> jax.Array:
        """Chooses actions."""
        if self.agent.initial_carry is not None:
            raise ValueError(
                "this agent remembers earlier observations, so one observation is not enough; use act_with_carry and pass the "
                "carry from step to step"
            )
        return self.act_with_carry(state, obs, (), key)[0]

    def initial_carry(self, num_envs: int) -> Any:
        """The carry at the start of an episode: a pytree of arrays `[E, ...]`, empty unless the agent is recurrent."""
        return () if self.agent.initial_carry is None else self.agent.initial_carry(num_envs)

    def act_with_carry(self, state: Any, obs: Any, carry: Any, key: jax.Array | None = None) -> tuple[jax.Array, Any]:
        """Chooses actions for raw observations, both `[E, ...]`; gives them and the carry for the next step, which is
        `initial_carry` at the start of an episode. None as the key takes the most probable actions."""
        observed = self.agent.env.observe(innermost(state).env_state, obs)
        if self.agent.initial_carry is None:
            return self.agent.act(state, observed, key), carry
        return self.agent.act(state, observed, key, carry)

    def probabilities(self, state: Any, obs: Any) -> jax.Array:
        """The probabilities of discrete actions, or of the values of every integer of an action."""
        if self.agent.initial_carry is not None:
            raise ValueError(
                "this agent remembers earlier observations, so one observation does not tell its probabilities; sample its "
                "actions with act_with_carry"
            )
        if self.agent.probabilities is None:
            raise ValueError("this agent has no categorical policy, so no probabilities of actions; use act")
        return self.agent.probabilities(state, self.agent.env.observe(innermost(state).env_state, obs))

    def batched(self, obs: Any) -> tuple[Any, bool]:
        """Checks raw observations."""
        kind = self.observation_type
        if isinstance(kind, MaskedObservation) != isinstance(obs, MaskedObservation):
            raise ValueError(
                f"{env_name(self.env)} names its legal actions; give them with the observation: "
                "act(msrl_jax.envs.MaskedObservation(obs, action_mask))"
                if isinstance(kind, MaskedObservation)
                else f"{env_name(self.env)} names no legal actions; give the observation without an action_mask"
            )
        obs = jax.tree.map(lambda t, x: np.asarray(x, t.dtype), kind, obs)
        shapes, wanted = ([x.shape for x in jax.tree.leaves(t)] for t in (obs, kind))
        single = shapes == wanted
        if not single and [s[1:] for s in shapes] != wanted:
            raise ValueError(f"obs has shape {shapes}; the environment's observations have shape {wanted}, or [B, ...]")
        if single:
            obs = jax.tree.map(lambda x: x[None], obs)
        if (mask := mask_of(obs)) is not None and not mask.any(-1).all():
            number = np.argwhere(~mask.any(-1))[0].tolist()
            raise ValueError(f"observation {number} has no legal action; leave it out, or correct its action_mask")
        return obs, single

    def checked_carry(self, carry: Any, count: int) -> Any:
        """The carry of a number of observations, that at the start of an episode for None."""
        fresh = self.initial_carry(count)
        carry = fresh if carry is None else carry
        shapes, wanted = (jax.tree.map(np.shape, c) for c in (carry, fresh))
        if shapes != wanted:
            raise ValueError(
                f"carry has shapes {shapes}; the carry of {count} observations has shapes {wanted}. Pass the carry that the "
                "last call returned, or None at the start of an episode"
            )
        return carry

    @functools.cached_property
    def state_type(self) -> Any:
        """The state of one run as a pytree of `jax.ShapeDtypeStruct`."""
        return jax.eval_shape(lambda: self.agent.with_data(self.agent.init(jax.random.key(0))))

    @functools.cached_property
    def observation_type(self) -> Any:
        """A single raw observation as a pytree of `jax.ShapeDtypeStruct`."""
        return observation_type(self.env)

    @functools.cached_property
    def _needed(self) -> tuple[bool, ...]:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), self.observation_type)
        carry = self.initial_carry(1)

        def act_both_ways(state, batch):
            return [self.act_with_carry(state, batch, carry, key) for key in (None, jax.random.key(0))]

        jaxpr = jax.make_jaxpr(act_both_ways)(self.state_type, batch).jaxpr
        used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
        sources = in_source(self.state_type)  # an environment in which the agent acts draws its parameters from them
        return tuple(id(v) in used or on for v, on in zip(jaxpr.invars[: len(sources)], sources, strict=True))

    def take(self, state: Any, device: Device | None = None) -> list[jax.Array]:
        """Copies the leaves of `state` that acting needs to one device."""
        flat = jax.tree.leaves(state)
        if any(self._needed[len(flat) :]):  # an algorithm's own state, without the numbers of its member
            raise ValueError("the agent acts by numbers of its config in which members differ; use result.act(obs, member=...)")
        leaves = processes.to_hosts([leaf for leaf, needed in zip(flat, self._needed, strict=False) if needed])
        if device is None:
            at_hand = bool(leaves) and processes.count() == 1
            device = leaves[0].addressable_shards[0].device if at_hand else jax.local_devices()[0]
        return jax.device_put(leaves, device)

    def restore(self, leaves: list[jax.Array]) -> Any:
        """Rebuilds a state from the leaves of `take`; the other leaves are zeros. Call it under `jit`."""
        kept = iter(leaves)
        types, tree = jax.tree.flatten(self.state_type)
        pairs = zip(types, self._needed, strict=True)
        return jax.tree.unflatten(tree, [next(kept) if needed else _zeros(t) for t, needed in pairs])


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)
