"""The learner's half of an iteration as the program of a run, which learns from what actors send."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.experiment.pool import Pool
from msrl_jax.fragments.placement import Device


class Learning:
    """The learner's half of an iteration, in the place of a `Program`: it runs on what actors send.

    Its runs may be shorter than what is asked for, if no unroll comes for a second.
    """

    is_fused, registers = False, {}

    def __init__(self, pool: Pool):
        self.pool, self.parts = pool, pool.parts
        self.compile_seconds = 0.0

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of the learner."""
        return (self.parts.device,)

    @property
    def shardings(self) -> tuple[Any, tuple[()]]:
        """Where the state is."""
        return jax.tree.map(lambda _: self.parts.at, self.parts.state), ()

    @property
    def metrics_bytes(self) -> int:
        """Bytes of the metrics of one iteration."""
        return sum(v.nbytes for v in self.parts.halves.schedule.metrics)

    def begin(self, chunk: int = 1) -> None:
        """Does nothing: the program is small."""

    def warm_up(self, chunk: int = 1) -> None:
        """Compiles the program."""
        start = time.perf_counter()
        _ = self.parts.learn
        self.compile_seconds += time.perf_counter() - start

    def initialize(self, init: Callable[..., Any], *args: Any) -> Any:
        """Computes a state."""
        start = time.perf_counter()
        compiled = jax.jit(init, out_shardings=self.parts.at).lower(*args).compile()
        self.compile_seconds += time.perf_counter() - start
        return compiled(*args)

    def place(self, state: Any) -> Any:
        """Copies a state."""
        return jax.tree.map(lambda x: jax.device_put(jnp.copy(x), self.parts.at), state)

    def unwrap(self, state: Any) -> Any:
        """The state."""
        return state

    def run(self, state: Any, iterations: int, *, chunk: int | None = None, donate: bool = False) -> tuple[Any, Any]:
        """Learns from at most so many unrolls; the metrics have a row for each."""
        leaves, tree = jax.tree.flatten(state if donate else self.place(state))
        rows: list[list[np.ndarray]] = []
        while len(rows) < iterations and (unroll := self.pool.take()) is not None:
            leaves, metrics = self.parts.learn(leaves, jax.device_put(unroll.arrays, self.parts.at))
            self.pool.iteration += 1
            self.pool.publish(leaves)
            self.pool.answer(unroll.actor)
            rows.append(jax.device_get(metrics))
        kinds = [v.aval for v in self.parts.halves.schedule.metrics]
        columns = [np.stack(column) for column in zip(*rows, strict=True)] or [np.zeros((0, *x.shape), x.dtype) for x in kinds]
        return jax.tree.unflatten(tree, leaves), jax.tree.unflatten(self.parts.metrics, columns)
