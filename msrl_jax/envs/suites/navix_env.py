"""Environments of NAVIX (https://github.com/epignatelli/navix; Pignatelli et al. 2024, arXiv 2407.19396)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import PyTree, Stepped, output_shapes, to_32_bit
from msrl_jax.envs.suites import common


def make(name: str, **params: Any) -> "NavixEnvironment":
    """Makes an environment of NAVIX, such as "Navix-DoorKey-8x8-v0"; `params` are arguments of `navix.make`.

    Functions can be given by their names in `navix.observations` (`observation_fn="symbolic_first_person"`),
    `navix.rewards` (`reward_fn`) and `navix.terminations` (`termination_fn`).
    """
    navix = common.load("navix")
    full = common.full_name("navix", name, navix.registry())
    if "disable_autoreset" in params:
        raise ValueError(f"{full}: this adapter resets environments itself; remove disable_autoreset")
    modules = {"observation_fn": "observations", "reward_fn": "rewards", "termination_fn": "terminations"}
    for key, module in modules.items():
        if isinstance(function := params.get(key), str):
            functions = vars(common.load(f"navix.{module}"))
            names = [n for n, x in functions.items() if callable(x) and getattr(x, "__module__", "") == f"navix.{module}"]
            common.check_name(f"navix.{module}", function, names)
            params[key] = functions[function]
    return NavixEnvironment(common.build(full, functools.partial(navix.make, name, disable_autoreset=True), params), full)


class NavixEnvironment:
    """An environment of NAVIX without automatic reset.

    The metric `success` tells whether the last step was rewarded, e.g. for reaching the goal; without rewards there is none.
    """

    def __init__(self, env: Any, name: str):
        self.env, self.name = env, name
        self.metrics = {} if env.reward_fn is common.load("navix.rewards").free else {"success": "last"}
        self.observation_space = spaces.unbounded(output_shapes(self.reset)[1])
        self.action_space = spaces.Discrete(len(env.action_set))

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        first = to_32_bit(self.env.reset(key))
        return first, first.observation

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        """Advances the episode; random numbers come from the key in the state, as in the suite."""
        timestep = to_32_bit(self.env.step(state, jnp.asarray(action, jnp.int32)))
        return timestep, timestep.observation, timestep.reward, timestep.is_termination(), timestep.is_truncation()

    render_fps = 8.0

    def render(self, state: PyTree) -> np.ndarray:
        """Returns the grid."""
        return np.asarray(common.load("navix.observations").rgb(jax.tree.map(jnp.asarray, state.state)), np.uint8)

    def report(self, state: PyTree) -> dict[str, jax.Array]:
        """Whether the last step was rewarded."""
        return {"success": state.reward > 0}
