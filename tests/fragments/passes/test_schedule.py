"""Rows of a loop are read and stored by the programs that run anyway."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import Loop, RunProgram
from tests.support.compare import assert_close, run_plain


def test_rows_that_pass_through_a_loop_are_stored_by_programs_that_run_anyway():
    """A carried value as it enters, a row that a program of the loop reads, and a row that none reads."""
    push = msrl.fragment(role="env", name="push")(lambda x, row: x + row)
    fit = msrl.fragment(role="learner", name="fit")(lambda w, x: w + x.mean())

    @msrl.fragment(role="learner")
    def both(w, x, row, unread):  # `lax.scan` does not see that it returns rows
        x = push(x, row)
        return fit(w, x), x, row, unread

    def iteration(state):
        def step(carry, rows):
            w, x, row, unread = both(*carry, *rows)
            return (w, x), (row, unread, carry[0])

        start, rows = (state["w"], state["x"]), jnp.ones((3, 8)) * state["x"]
        (w, x), (rows, unread, ws) = jax.lax.scan(step, start, (rows, jnp.arange(3.0) * state["w"]))
        return {"w": w, "x": push(x, rows.sum(0))}, {"unread": unread, "w": ws}

    state = {"w": jnp.float32(1), "x": jnp.arange(8.0)}
    program = msrl.compile(iteration, state, policy=msrl.policies.SingleLearnerFine(), axes={"w": P(), "x": P("env")})
    (loop,) = [i for i in program.instructions if isinstance(i, Loop)]
    stored = [(i.name, i.placement.name, len(i.writes)) for i in loop.body if isinstance(i, RunProgram)]
    assert stored == [("push", "envs", 1), ("fit", "learners", 2)]
    assert_close(program.run(state, 2), run_plain(iteration, state, 2))
