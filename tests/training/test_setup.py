"""Parameters after the colon of a name."""

import pytest

from msrl_jax.policies import Central, SingleLearnerCoarse, SingleLearnerFine, base
from msrl_jax.training.setup import resolve_policy

SPECS = [
    (
        "SingleLearnerCoarse:learners=2,trajectory_codec=frame_stack(4)",
        SingleLearnerCoarse(learners=2, trajectory_codec="frame_stack(4)"),
    ),
    ("SingleLearnerFine:observation_codec={obs: uint8}", SingleLearnerFine(observation_codec={"obs": "uint8"})),
    ("Central:gradient_codec={'': bfloat16, state.x: 'uint8'}", Central(gradient_codec={"": "bfloat16", "state.x": "uint8"})),
]


@pytest.mark.parametrize(("spec", "policy"), SPECS)
def test_codecs_are_written_as_words_calls_and_dictionaries(spec, policy):
    assert resolve_policy(spec) == policy == resolve_policy(base.spec(policy))


@pytest.mark.parametrize("text", ["learners=1+1", "learners=[", "trajectory_codec={**x}"])
def test_an_unreadable_value_is_refused(text):
    with pytest.raises(ValueError, match="cannot read"):
        resolve_policy(f"SingleLearnerCoarse:{text}")
