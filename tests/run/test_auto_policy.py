"""`policy="auto"`: the fastest of the policies that compute the same run, why, and what it cannot know."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import policies
from msrl_jax.cli import main
from msrl_jax.fragments.measure import delayed, predict
from msrl_jax.fragments.runtime.timing import Prediction
from msrl_jax.report.bench import program_runner
from msrl_jax.run import auto_policy
from msrl_jax.run.prepare import make_experiment

SMALL = {"num_envs": 8, "unroll_length": 4, "num_minibatches": 2, "num_epochs": 1, "hidden_sizes": (8,)}


def small(**changes):
    return make_experiment("ppo", "CartPole-v1", **SMALL | changes)


@pytest.fixture(scope="module")
def choice():
    return msrl.choose_policy(small(), policies=["GPUOnly", "SingleLearnerCoarse", "SingleLearnerFine"], delay=1.0)


@pytest.mark.long
def test_slow_transfers_choose_a_policy_without_any(choice):
    assert choice.policy == policies.GPUOnly()
    names = [type(a.policy).__name__ for a in choice.alternatives]
    assert names == ["GPUOnly", "SingleLearnerCoarse", "SingleLearnerFine"]
    _, coarse, fine = (a.prediction for a in choice.alternatives)
    assert coarse.exchanges == 2 and fine.exchanges > 2 * 4
    assert 2.0 <= coarse.seconds < 2.5 and fine.seconds >= 2 * 4
    text = str(choice)
    assert text.startswith("GPUOnly: ") and "if transfers take 1000 ms longer" in text and "times as long" in text
    assert json.loads(json.dumps(choice.to_dict()))["alternatives"][1]["prediction"]["exchanges"] == 2


def fixed(monkeypatch, seconds):
    """Lets every policy take the seconds of its name."""

    def predict(program, state, *, delay=0.0):
        return Prediction(seconds[program.layout.policy.partition("(")[0]], {}, 0.0, 0.0, 0)

    monkeypatch.setattr(auto_policy, "predict", predict)


def left(monkeypatch, *names):
    """Leaves only the policies of these names, and those that are registered later."""
    all_names, others = policies.names, set(policies.names()) - {*names}
    monkeypatch.setattr(policies, "names", lambda: [name for name in all_names() if name not in others])


@pytest.mark.long
def test_what_a_short_measurement_does_not_tell_apart_is_said(monkeypatch):
    fixed(monkeypatch, {"GPUOnly": 1.05, "MultiLearner": 1.0, "SingleLearnerCoarse": 2.0})
    found = msrl.choose_policy(small(), policies=["GPUOnly", "MultiLearner", "SingleLearnerCoarse"])
    assert found.policy == policies.MultiLearner()
    assert "SingleLearnerCoarse 2 times as long" in found.reason and "does not tell it from GPUOnly" in found.reason


@pytest.mark.long
def test_training_with_auto_is_training_with_the_chosen_policy(monkeypatch, capsys):
    left(monkeypatch, "GPUOnly", "SingleLearnerCoarse")
    fixed(monkeypatch, {"GPUOnly": 2.0, "SingleLearnerCoarse": 1.0})
    common = {"total_steps": 64, "eval_episodes": 0, "progress": "lines", **SMALL}
    auto = msrl.train("ppo", "CartPole-v1", policy="AUTO", **common)
    assert "policy SingleLearnerCoarse: 1,000 ms per iteration" in capsys.readouterr().err
    named = msrl.train("ppo", "CartPole-v1", policy="SingleLearnerCoarse", **common)
    assert auto.description["policy"] == named.description["policy"] == "SingleLearnerCoarse"
    params = (jax.tree.leaves(r.state.params) for r in (auto, named))
    assert all(np.array_equal(a, b) for a, b in zip(*params, strict=True))


def test_policies_that_cannot_run_it_are_listed_with_the_reason(monkeypatch):
    fixed(monkeypatch, {"GPUOnly": 1.0})
    nine = policies.SingleLearnerCoarse(learners=9)
    found = msrl.choose_policy(small(), policies=["GPUOnly", nine])
    assert found.policy == policies.GPUOnly() and found.alternatives[1].prediction is None
    assert "SingleLearnerCoarse:learners=9: " in str(found) and "needs 10 devices" in str(found)
    with pytest.raises(ValueError, match=r"found no policy that can run this: SingleLearnerCoarse:learners=9: .*needs 10"):
        msrl.choose_policy(small(), policies=[nine])


def test_on_one_device_nothing_is_measured():
    found = msrl.choose_policy(small(), devices=jax.devices()[:1])
    assert found.policy == policies.GPUOnly() and found.alternatives[0].prediction is None and "one device" in str(found)


@pytest.mark.slow
def test_policies_of_users_are_candidates_if_they_need_no_parameters(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Needs:
        part: int

        def layout(self, devices, sizes):
            raise AssertionError

    @dataclasses.dataclass(frozen=True)
    class Breaks:
        def layout(self, devices, sizes):
            raise KeyError("nothing of this name")

    left(monkeypatch, "GPUOnly", "Central")
    for policy in (Needs, Breaks):
        monkeypatch.setitem(policies.POLICIES, policy.__name__, policy)
    fixed(monkeypatch, {"GPUOnly": 2.0, "Central": 1.0})
    found = msrl.choose_policy(small())
    assert found.policy == policies.Central()
    assert [a.refusal for a in found.alternatives if a.prediction is None] == ["KeyError: 'nothing of this name'"]
    with pytest.raises(ValueError, match="cannot be named 'auto'"):
        policies.register(type("Auto", (Breaks,), {}))


def test_a_request_to_stop_ends_the_measurement():
    with pytest.raises(KeyboardInterrupt, match="SIGINT, while a policy was chosen, so nothing was trained"):
        auto_policy.resolve_policy("auto", small(), None, print, lambda: "SIGINT")


UNKNOWN = [
    (lambda: msrl.choose_policy(small(), policies=[]), "has no candidate"),
    (lambda: msrl.choose_policy(small(), policies=["SingleLearnerCoarse:staleness=1"]), "found no .*acts with old parameters"),
    (lambda: msrl.choose_policy(small(), policies=["Central:parameter_codec=bfloat16"]), "a codec that loses precision"),
    (lambda: msrl.choose_policy(small(), delay=-1.0), "a delay of -1.0 must be a number of seconds of at least 0"),
    (lambda: msrl.choose_policy(small(), devices=[]), "^devices is empty; pass at least one"),
    (lambda: policies.get("Auto"), "is for train, and for explain without"),
    (lambda: msrl.train("ppo", policy="auto:learners=2", progress=False), "and has no parameters"),
    (lambda: msrl.train("ppo", "gymnasium:CartPole-v1", policy="auto", progress=False), "measuring would step its simulators"),
]


@pytest.mark.parametrize(("ask", "message"), UNKNOWN)
def test_what_it_cannot_know_is_said_with_a_remedy(ask, message):
    with pytest.raises(ValueError, match=message):
        ask()


@pytest.mark.slow
def test_the_command_shows_the_choice_and_its_plan(monkeypatch, capsys):
    left(monkeypatch, "GPUOnly", "Central")
    fixed(monkeypatch, {"GPUOnly": 2.0, "Central": 1.0})
    given = "explain --policy auto --num-envs 8 --unroll-length 4 --num-minibatches 2"
    assert main(given.split()) == 0
    out = capsys.readouterr()
    assert "measuring GPUOnly" in out.err and out.out.startswith("Central: ") and "\nCentral(): " in out.out
    assert main([*given.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choice"]["policy"] == "Central"


CASES = [
    ("ppo", {"num_envs": 16, "unroll_length": 8, "num_minibatches": 4}),
    ("ppo", {"num_envs": 256, "unroll_length": 16, "num_minibatches": 4, "hidden_sizes": (128, 128)}),
    ("a2c", {"num_envs": 64, "unroll_length": 8}),
    ("impala", {"num_envs": 64, "unroll_length": 16}),
    ("dqn", {"num_envs": 16}),
]
DELAYS = (0.0, 2e-4, 1e-3, 6e-3)


@pytest.mark.slow
def test_the_choice_is_the_fastest_measured_policy_or_within_a_tenth_of_it():
    """20 cases: algorithms and sizes times delays of a transfer, which the host sleeps."""
    regrets = {}
    for number, (algo, sizes) in enumerate(CASES):
        experiment = make_experiment(algo, "CartPole-v1", **sizes)
        programs = {name: experiment.compile(policies.get(name)) for name in policies.names()}
        for delay in DELAYS:
            predicted, measured = {}, {}
            for name, program in programs.items():
                predicted[name] = predict(program, experiment.start(program), delay=delay).seconds
                count = max(1, round(0.3 / predicted[name]))
                with delayed(program, delay):
                    measured[name] = 1 / program_runner(experiment, program, count).run(1.0)
            best = min(predicted, key=predicted.get)
            regrets[number, delay] = measured[best] / min(measured.values())
            print(algo, sizes, delay, best, min(measured, key=measured.get), regrets[number, delay])
    assert len(regrets) == len(list(itertools.product(CASES, DELAYS))) == 20
    assert sum(r <= 1.1 for r in regrets.values()) >= 18, regrets


