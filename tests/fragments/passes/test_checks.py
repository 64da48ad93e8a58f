"""What is wrong with a loop, a policy or JAX's settings is refused before anything compiles."""


import jax
import jax.numpy as jnp
import pytest

import msrl_jax as msrl
from msrl_jax import codecs
from msrl_jax.fragments.passes.checks import check_effects
from msrl_jax.policies import Edge, Layout, SingleLearnerCoarse
from tests.support import toy

COARSE = msrl.policies.SingleLearnerCoarse()


@msrl.fragment(role="actor")
def act(x):
    return x + 1


@msrl.fragment(role="learner")
def fit(x):
    return x * 2


def compile_(iteration, state, policy=COARSE, **options):
    return msrl.compile(iteration, state, policy=policy, **options)


class Packed:
    """A policy with codecs added to its edges."""

    def __init__(self, policy, *codecs):
        self.policy, self.codecs = policy, codecs

    def layout(self, devices, sizes):
        layout = self.policy.layout(devices, sizes)
        return Layout(layout.roles, layout.staleness, self.codecs, layout.policy)


def test_a_mesh_around_a_program_is_refused():
    iteration, state = lambda s: (fit(act(s)), {}), jnp.ones(8)
    program = compile_(iteration, state)
    with jax.set_mesh(jax.make_mesh((4,), ("d",))):
        for call in (lambda: program.run(state, 1), lambda: program(state), lambda: program.place(state)):
            with pytest.raises(RuntimeError, match=r"jax\.set_mesh has set .*Leave the context"):
                call()
        with pytest.raises(RuntimeError, match="Leave the context"):
            compile_(iteration, state)


def test_unknown_codecs_and_placements_are_refused():
    def refused(policy, message):
        with pytest.raises(ValueError, match=message):
            msrl.compile(toy.iteration, toy.initial_state(), policy=policy, axes=toy.AXES)

    refused(SingleLearnerCoarse(trajectory_codec="bf16"), r"unknown codec 'bf16'; there are bfloat16, scaled_uint8, uint8")
    refused(Packed(SingleLearnerCoarse(), Edge("actor", "learners", "uint8")), r"no placement 'actor': it has actors, learners")
    wrong = SingleLearnerCoarse(trajectory_codec={"stat.x": "bfloat16"})
    refused(wrong, r"packs values named 'stat.x' from 'actors' to 'learners', but .* no such value .did you mean 'state.x'")
    with pytest.raises(ValueError, match="at least 2 frames"):
        codecs.frame_stack(1)


def test_ordered_callbacks_are_for_a_single_process(monkeypatch):
    """JAX would end the process; callbacks without an order run."""

    def effects(ordered):
        show = lambda x: jax.experimental.io_callback(print, None, x, ordered=ordered)  # noqa: E731
        return jax.make_jaxpr(show)(1.0).effects

    check_effects(effects(ordered=True))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    check_effects(effects(ordered=False))
    with pytest.raises(ValueError, match=r"OrderedIO.*2 processes; use ordered=False"):
        check_effects(effects(ordered=True))
