"""Checks for runs with a replay buffer: whether they learn at all, and their replay ratio (updates per environment step)."""

import dataclasses
from typing import Any

from msrl_jax.agents.agent import Agent


def check_learns(agent: Agent, steps: int) -> None:
    """Raises ValueError if a run of `steps` environment steps ends before the first update."""
    if steps < agent.learning_starts:
        steps_each = agent.steps_per_iteration
        raise ValueError(
            f"a run of {steps:,} steps learns nothing: the first update is after {agent.learning_starts:,}; use a total_steps "
            f"of at least {-(-agent.learning_starts // steps_each) * steps_each}, or a smaller learning_starts"
        )


def replay_ratio(agent: Agent, config: Any) -> str:
    """Describes the updates per environment step of an agent with a replay buffer, and those of the config's defaults."""
    ratio = agent.updates_per_iteration / agent.steps_per_iteration
    text = f"replay ratio: {ratio:.3g} updates per environment step"
    if not hasattr(config, "num_updates"):  # several teams, each with its own config
        return text
    text += f", of batch_size={config.batch_size}"
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(config)}
    default_ratio = defaults["num_updates"] / (defaults["num_envs"] * defaults["unroll_length"])
    if config.num_updates == defaults["num_updates"] and default_ratio != ratio:
        num_updates = max(1, round(default_ratio * agent.steps_per_iteration))
        text += (
            f" ({default_ratio:.3g} with the default num_envs and unroll_length; num_updates={num_updates} keeps about that)"
        )
    return text
