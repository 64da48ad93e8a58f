"""Environments of NAVIX (https://github.com/epignatelli/navix; Pignatelli et al. 2024, arXiv 2407.19396)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.envs import spaces
from msrl_jax.envs.base import PyTree, strong
from msrl_jax.envs.suites import common


def make(name: str, **params: Any) -> "NavixEnvironment":
    """Builds an environment of NAVIX.

    Args:
      name: one of its ids, such as "Navix-DoorKey-8x8-v0".
      **params: arguments of `navix.make`: `max_steps=100`; `observation_fn="symbolic_first_person"` and other names of
        functions in `navix.observations`, `navix.rewards` (`reward_fn`) and `navix.terminations` (`termination_fn`).

    Returns:
      The environment.

    Raises:
      ValueError: on an unknown name, or on a parameter that the environment refuses.
    """
    navix = common.load("navix")
    common.check_name("NAVIX", name, navix.registry())
    full = f"navix:{name}"
    if "disable_autoreset" in params:
        raise ValueError(f"{full}: resets are ours; leave out disable_autoreset")
    modules = {"observation_fn": "observations", "reward_fn": "rewards", "termination_fn": "terminations"}
    for key, module in modules.items():
        if isinstance(function := params.get(key), str):
            known = vars(common.load(f"navix.{module}"))
            names = [n for n, x in known.items() if callable(x) and getattr(x, "__module__", "") == f"navix.{module}"]
            common.check_name(f"navix.{module}", function, names)
            params[key] = known[function]
    made = common.build(full, lambda **kwargs: navix.make(name, disable_autoreset=True, **kwargs), params)
    return NavixEnvironment(made, full)


@dataclasses.dataclass(frozen=True, eq=False)
class NavixEnvironment:
    """An environment of NAVIX without automatic reset.

    Attributes:
      env: the environment of the suite.
      name: its name in messages.
    """

    env: Any
    name: str
    observation_space: spaces.Space = dataclasses.field(init=False)
    action_space: spaces.Discrete = dataclasses.field(init=False)

    def __post_init__(self):
        _, obs = common.emitted(self.reset)
        object.__setattr__(self, "observation_space", common.unbounded(obs))
        object.__setattr__(self, "action_space", spaces.Discrete(len(self.env.action_set)))

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        first = strong(self.env.reset(key))
        return first, first.observation

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> common.Stepped:
        """Advances the episode; what is random is drawn from the key in the state, as in the suite."""
        after = strong(self.env.step(state, jnp.asarray(action, jnp.int32)))
        return after, after.observation, after.reward, after.is_termination(), after.is_truncation()
