"""The actor-critic algorithms with intrinsic rewards: each extends another algorithm by `intrinsic_coef`."""

import dataclasses
from typing import Any

from msrl_jax.agents.agent import Agent
from msrl_jax.algorithms.a2c import A2C
from msrl_jax.algorithms.impala import IMPALA
from msrl_jax.algorithms.ppo import PPO
from msrl_jax.configs.config import Tunable, config, tunable
from msrl_jax.configs.replacing import replace_unchecked
from msrl_jax.envs import Environment
from msrl_jax.rnd.distillation import exploring


def _explorer(base: Any, name: str) -> type:
    """Makes the config of an algorithm from that of another one, with the additional field `intrinsic_coef`."""

    def check(self: Any) -> None:
        """Raises ValueError where the other algorithm does, or if batches are replayed."""
        if getattr(self, "replay_batches", 0):
            raise ValueError(
                f"{name}.replay_batches={self.replay_batches}: intrinsic rewards are outdated when a batch is replayed; "
                f"use replay_batches=0, or {base.name}"
            )
        if hasattr(base, "check"):
            base.check(self)

    def build(self: Any, env: Environment) -> Agent:
        """Builds the agent for one environment; raises the same errors as the other algorithm."""
        base_config = replace_unchecked(base(), {f.name: getattr(self, f.name) for f in dataclasses.fields(base)})
        return exploring(base_config.build(env), self)

    doc = "weight of the intrinsic advantage. Usual: 0.5."
    fields = {f.name: dataclasses.field(default=f.default, metadata=f.metadata) for f in dataclasses.fields(base)}
    parts = {"intrinsic_coef": tunable(default=0.5, above=0, doc=doc), "check": check, "build": build}
    attributes = {
        "__doc__": f"{base.__name__} with an intrinsic reward for unfamiliar observations (RND).",
        "__module__": __name__,
        "__annotations__": base.__annotations__ | {"intrinsic_coef": Tunable},
    }
    return config(f"{base.name}_rnd", privileged=True)(type(name, (), fields | parts | attributes))


PPORND = _explorer(PPO, "PPORND")
A2CRND = _explorer(A2C, "A2CRND")
IMPALARND = _explorer(IMPALA, "IMPALARND")
