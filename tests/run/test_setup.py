"""Parameters after the colon of a name; arguments of a wrong type are refused with the field and the remedy."""

from pathlib import Path

import pytest

import msrl_jax as msrl
from msrl_jax._files import as_path
from msrl_jax.policies import Central, SingleLearnerCoarse, SingleLearnerFine, helpers
from msrl_jax.run.loop.callbacks import check_callbacks

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
    assert msrl.policies.get(spec) == policy == msrl.policies.get(helpers.policy_text(policy))


@pytest.mark.parametrize("text", ["learners=1+1", "learners=[", "trajectory_codec={**x}"])
def test_an_unreadable_value_is_refused(text):
    with pytest.raises(ValueError, match="cannot read"):
        msrl.policies.get(f"SingleLearnerCoarse:{text}")


CODEC_FIELDS = [
    (SingleLearnerCoarse, "trajectory_codec"),
    (SingleLearnerCoarse, "parameter_codec"),
    (SingleLearnerFine, "observation_codec"),
    (Central, "gradient_codec"),
    (Central, "parameter_codec"),
]


@pytest.mark.parametrize(("policy", "field"), CODEC_FIELDS)
def test_a_codec_of_another_type_is_refused(policy, field):
    for codec in (3, True, ["uint8"], {"obs": 3}, {"obs": None}, {3: "uint8"}):
        with pytest.raises(TypeError, match=rf"{policy.__name__}: {field}=.* is not a codec; use .*'bfloat16'.* or None"):
            policy(**{field: codec})


def test_callbacks_are_a_sequence_of_functions():
    class Series:
        def after(self, run): ...

    async def later(tick): ...

    assert check_callbacks(iter([print, len])) == (print, len) and check_callbacks(()) == ()
    refused = {
        "callbacks=3 is not a sequence": 3,
        "callbacks=None .*leave it out": None,
        r"write callbacks=\[print\]": print,
        r"callbacks\[0\]=.* missing a required argument: 'b'; write a function of one argument": [lambda a, b: None],
        r"callbacks\[1\]=3 cannot be called": [print, 3],
        "Series'> cannot be called; use .* an instance of a hook": [Series],
        "later at .* would not run when it is called": [later],
    }
    for message, given in refused.items():
        with pytest.raises(TypeError, match=message):
            check_callbacks(given)


@pytest.mark.parametrize("every", [0, -64, 2.5, "100", True])
def test_a_hook_says_in_whole_steps_when_chunks_end(every):
    hook = type("Hook", (), {"every": every, "after": lambda self, run: None})()
    with pytest.raises(ValueError, match=rf"^callbacks\[1\]\.every={every!r}: use an integer of at least 1"):
        check_callbacks([print, hook])


def test_a_path_is_text_or_an_object_that_stands_for_one(tmp_path):
    assert as_path("out", "run") == Path("run") and as_path("out", tmp_path) == tmp_path
    with pytest.raises(TypeError, match=r"out=3: use a path as a string or a pathlib.Path, or omit it"):
        as_path("out", 3)
