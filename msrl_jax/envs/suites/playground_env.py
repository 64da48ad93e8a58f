"""Environments of MuJoCo Playground (https://playground.mujoco.org; Zakka et al. 2025, arXiv 2502.08844)."""

import subprocess
from typing import Any

from msrl_jax.envs.privileged import Unprivileged
from msrl_jax.envs.reset_pool import ResetPool
from msrl_jax.envs.suites import common
from msrl_jax.envs.suites.brax_env import limited


def make(name: str, *, reset_ratio: int = 512, privileged: bool = True, **params: Any) -> ResetPool:
    """Makes an environment of MuJoCo Playground, such as "CheetahRun"; `reset_ratio` is that of `ResetPool`.

    If it has a privileged state and `privileged` is True, critics see that state and actors the rest; otherwise both see the
    rest. Resets are pooled because some let the bodies fall for 200 steps. Other parameters are values of the environment's
    config, such as `ctrl_dt`, `episode_length` and `action_repeat`; the default physics is `impl="jax"`, the same on all
    platforms.
    """
    registry = common.load("mujoco_playground").registry
    full = common.full_name("playground", name, registry.ALL_ENVS)
    config = registry.get_default_config(name)
    common.check_params(full, params, {*config, "reset_ratio", "privileged"})
    config.update({"impl": "jax"} if "impl" in config else {})
    values = {key: common.fit(f"{full}: {key}", x, config[key]) for key, x in params.items()}
    try:
        env = common.build(full, lambda **values: registry.load(name, config, values), values)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(
            f"{full} needs the meshes of MuJoCo Menagerie, which Playground fetches with git at first use, and that failed "
            f"({error}); connect to the internet, or use the DeepMind Control Suite, such as playground:CheetahRun"
        ) from error
    config.update(values)
    env = limited(env, full, config.episode_length, config.get("action_repeat", 1))
    return ResetPool(env if privileged else Unprivileged(env), reset_ratio)
