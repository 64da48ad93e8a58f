"""An iteration as two compiled programs, the actor's and the learner's, which both processes build in the same way."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from msrl_jax.elastic.split_iteration import Apart, Halves, split
from msrl_jax.envs.base import PyTree, is_on_host
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.runtime.cpu_lowering import lower_jitted
from msrl_jax.run.experiment.experiment import Experiment


@dataclass(frozen=True, eq=False)
class SplitProgram:
    """The halves of an experiment's iteration, compiled on first use for one device of this process."""

    experiment: Experiment
    halves: Halves
    metrics: Any  # the structure of the metrics of an iteration
    device: Device

    @functools.cached_property
    def state(self) -> PyTree:
        """Shapes and dtypes of the state of the run."""
        return jax.eval_shape(self.experiment.initial_state)

    @functools.cached_property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding of all arrays."""
        return jax.sharding.SingleDeviceSharding(self.device)

    def _placed_types(self, kinds: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=self.sharding) for kind in kinds]

    @functools.cached_property
    def learn(self) -> jax.stages.Compiled:
        """`(leaves of the state, sent arrays) -> (next leaves, metrics)`; donates the leaves."""
        leaves, sent_types = self._placed_types(jax.tree.leaves(self.state)), self._placed_types(self.halves.sent_kinds)
        return lower_jitted(jax.jit(self.halves.learn, donate_argnums=0), leaves, sent_types)()

    @functools.cached_property
    def act(self) -> jax.stages.Compiled:
        """`(leaves of an actor, published arrays) -> (its next leaves, arrays to send)`."""
        leaves = jax.tree.leaves(self.state)
        private = self._placed_types([leaves[i] for i in self.halves.private])
        return lower_jitted(jax.jit(self.halves.act), private, self._placed_types(self.halves.published_kinds))()

    def initial_leaves(self, ticket: int) -> list[jax.Array]:
        """Returns the initial leaves of an actor: those of the run itself for ticket 0, from a separate key for other
        tickets.
        """
        # `split` derives keys like `fold_in`, from small numbers.
        key = self.experiment.key if ticket == 0 else jax.random.fold_in(self.experiment.key, np.uint32(2**32 - ticket))
        leaves = jax.tree.leaves(jax.jit(self.experiment.agent.init, out_shardings=self.sharding)(key))
        return [leaves[i] for i in self.halves.private]


def split_program(experiment: Experiment, device: Device | None = None) -> SplitProgram:
    """Splits the iteration of an experiment; raises ValueError with a remedy if remote actors cannot act for it."""

    def refusal(reason: str, remedy: str) -> ValueError:
        fact = f"{experiment.name} on {experiment.env_name} cannot learn from actors in other processes"
        return ValueError(f"{fact}: {reason}. Remove actors_at{remedy}")

    if jax.process_count() > 1:
        raise refusal(f"its learner would be {jax.process_count()} processes", ", or start the learner as one process")
    if experiment.has_members:
        reason = f"it has {experiment.members} members, whose data would come from several policies"
        raise refusal(reason, ", or train one seed with one value of each hyperparameter")
    if is_on_host(experiment.environment):
        raise refusal("its environments are simulated on the host", ", or use an environment that is written in JAX")
    if experiment.env_params is not None:
        reason = "env_params are part of its state, which actors do not read"
        raise refusal(reason, ", or set them in the name of the environment")
    if (agent := experiment.behavior.agent).unit != "environment steps":
        raise refusal("it is an offline RL algorithm", "; no actors are needed")
    env_state = getattr(jax.eval_shape(agent.init, jax.random.key(0)), "env_state", ())
    if env_state and jax.tree.leaves(jax.eval_shape(agent.env.statistics, env_state)):
        reason = "each actor would normalize with its own statistics"
        raise refusal(reason, ", or normalize_observations and normalize_rewards")

    def loop_refusal(reason: str) -> ValueError:
        return refusal(reason, ", or train impala, ppo or a2c with their defaults")

    device = jax.local_devices()[0] if device is None else device
    program = experiment.compile(Apart(device), [device])
    return SplitProgram(experiment, split(program.schedule, loop_refusal), program.traced.metrics, device)
