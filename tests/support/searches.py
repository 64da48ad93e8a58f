"""Algorithms that search, for tests."""

import jax

import msrl_jax as msrl


def apart(agent):
    """The plan of an agent whose search and learning are apart, and the bytes that go to the learner: no game does."""
    state = jax.eval_shape(agent.init, jax.random.key(0))
    policy = msrl.policies.SingleLearnerCoarse(actors=4, learners=1)
    program = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=jax.devices()[:5])
    plan = program.explain()
    placed = {f.name: f.placement for f in plan.fragments}
    assert placed["search"] == placed["env_step"] == "actors" and placed["gradients"] == "learners"
    assert not [c for c in plan.crossings if "env_state" in c.value]
    up = sum(c.nbytes * c.times for c in plan.crossings if c.source == "actors")
    return plan, up
