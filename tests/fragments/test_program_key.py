"""Programs share an executable only if no program could tell them apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl

OPENED = []


@dataclasses.dataclass(frozen=True)
class Simulator:
    """Equal to any other of its name, but each has a handle of its own."""

    name: str

    def __post_init__(self):
        OPENED.append(self)

    def __call__(self, x):
        return np.float32(1 + next(i for i, opened in enumerate(OPENED) if opened is self))


@pytest.mark.parametrize("call", [jax.pure_callback, jax.experimental.io_callback])
def test_callbacks_that_compare_equal_are_called_each(call):
    OPENED.clear()
    first, second = Simulator("CartPole-v1"), Simulator("CartPole-v1")
    kind = jax.ShapeDtypeStruct((), jnp.float32)
    act = msrl.fragment(role="actor")(lambda x: call(first, kind, x))
    learn = msrl.fragment(role="learner")(lambda x: call(second, kind, x))

    state = {"first": jnp.float32(0), "second": jnp.float32(0)}
    program = msrl.compile(
        lambda s: ({"first": act(s["first"]), "second": learn(s["second"])}, {}), state,
        policy=msrl.policies.SingleLearnerCoarse(), devices=jax.devices()[:1],
    )  # fmt: skip
    after, _ = program.run(state, 1)
    assert (after["first"], after["second"]) == (1, 2)
