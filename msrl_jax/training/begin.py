"""The begin of a run: from its settings, and the folder of a run that goes on, to a `Run` that can do its next chunk."""

import time

import jax

from msrl_jax.training.guard import Guard
from msrl_jax.training.pace import Pace
from msrl_jax.training.resume import Saved, continue_from, fingerprint, restore_state, warn_of_schedules
from msrl_jax.training.rollback import again
from msrl_jax.training.run import Run, make_evaluation, most_at_once
from msrl_jax.training.saving import Interval
from msrl_jax.training.settings import Settings


def begin(settings: Settings, saved: Saved | None, every: Interval, started: float) -> Run:
    """Makes the state of a run, or reads it from a checkpoint, and compiles what a chunk needs.

    Args:
      settings: the run.
      saved: the run that goes on, if one does.
      every: the time between checkpoints.
      started: time of `time.perf_counter` at which the run started.

    Returns:
      The run.
    """
    setup, program, description = settings.setup, settings.program, settings.description
    program.begin(most_at_once(program, settings.most))  # while the state is made
    state = restore_state(saved.checkpoint, setup, program) if saved and saved.checkpoint else setup.start(program)
    if saved and saved.checkpoint:  # the run was killed after a rollback, before its next checkpoint
        for number in range(saved.checkpoint.progress.get("rollbacks", 0), len(description["rollbacks"])):
            state = program.place(again(state, number + 1, setup))
    jax.block_until_ready(state)
    run = Run(
        setup=setup,
        program=program,
        run_state=state,
        iterations=settings.iterations,
        pace=Pace(settings.most, fixed=settings.chunk is not None),
        evaluate=make_evaluation(setup, settings.eval_episodes),
        eval_every=settings.eval_every,
        boundaries=() if settings.chunk else tuple(n for n in (settings.eval_every, every.steps, setup.exploit_steps) if n),
        experience=settings.experience,
        guard=Guard(setup, program, state, policy=settings.guard, iteration=saved.iteration if saved else 0),
        started=started,
        rollbacks=len(description["rollbacks"]),
        fingerprint=fingerprint(description),
    )
    run.seconds["setup_seconds"] = time.perf_counter() - started - program.compile_seconds
    if saved is not None:
        continue_from(saved, run)
        warn_of_schedules(saved, setup.config, description["total_steps"], run.step)
    if run.iteration < run.iterations:
        run.compile()
    return run
