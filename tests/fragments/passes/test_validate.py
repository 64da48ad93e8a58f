"""What is wrong with a loop, a policy or JAX's settings is refused before anything compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments import codecs
from msrl_jax.fragments.passes.validate import check_effects
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

    unknown = r"unknown codec 'bf16' \(did you mean 'bfloat16'\?\); use one of bfloat16, scaled_uint8, uint8"
    refused(SingleLearnerCoarse(trajectory_codec="bf16"), unknown)
    refused(Packed(SingleLearnerCoarse(), Edge("actor", "learners", "uint8")), r"no placement 'actor': it has actors, learners")
    wrong = SingleLearnerCoarse(trajectory_codec={"stat.x": "bfloat16"})
    refused(wrong, r"packs values named 'stat.x' from 'actors' to 'learners', but .* no such value .did you mean 'state.x'")
    with pytest.raises(ValueError, match="at least 2 frames"):
        codecs.frame_stack(1)


def test_ordered_callbacks_are_for_a_single_process(monkeypatch):
    """JAX would end the process; callbacks without an order run."""

    def effects(ordered):
        show = lambda x: jax.experimental.io_callback(print, None, x, ordered=ordered)
        return jax.make_jaxpr(show)(1.0).effects

    check_effects(effects(ordered=True))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    check_effects(effects(ordered=False))
    with pytest.raises(ValueError, match=r"OrderedIO.*2 processes; use ordered=False"):
        check_effects(effects(ordered=True))


def test_environments_that_do_not_divide_are_refused():
    state = {"x": jnp.ones(6)}
    policy = msrl.policies.SingleLearnerCoarse(actors=4)
    with pytest.raises(ValueError, match=r"num_envs=6 cannot be split over the 4 devices of placement 'actors'.*1 or 2 or 3"):
        compile_(lambda s: ({"x": fit(act(s["x"]))}, {}), state, policy, axes={"x": P("env")})
    state = {"x": jnp.ones(16), "groups": jnp.ones((2, 8))}
    with pytest.raises(ValueError, match=r"axis 'env' of state\['groups'\], which has size 2, cannot be split over the 4"):
        compile_(lambda s: ({**s, "x": fit(act(s["x"]))}, {}), state, policy, axes={"x": P("env"), "groups": P("env")})


@pytest.mark.parametrize(
    "policy",
    [
        msrl.policies.GPUOnly(num_devices=9),
        msrl.policies.MultiLearner(num_devices=16),
        msrl.policies.SingleLearnerCoarse(actors=8, learners=1),
        msrl.policies.SingleLearnerFine(learners=8),
        msrl.policies.Environments(envs=8, agents=1),
        msrl.policies.Central(workers=7, shards=2),
    ],
    ids=lambda p: type(p).__name__,
)
def test_more_devices_than_there_are_is_refused(policy):
    with pytest.raises(ValueError, match=r"there are [78]|there are 0"):
        compile_(lambda s: (s, {}), {"x": jnp.ones(8)}, policy)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_device_counts_are_positive_integers(count):
    kinds = {"SingleLearnerCoarse": "learners", "SingleLearnerFine": "learners", "Central": "shards"}
    kinds |= {} if count is None else {"GPUOnly": "num_devices", "MultiLearner": "num_devices", "Environments": "agents"}
    for kind, name in kinds.items():
        with pytest.raises(ValueError, match=rf"^{kind}: {name}={count!r}: use an integer of at least 1$"):
            getattr(msrl.policies, kind)(**{name: count})


class NoLayout:
    def layout(self, devices, sizes):
        return None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "GPUOnly"}, TypeError, r"policy='GPUOnly' is not a policy.*policies\.get\('GPUOnly'\)"),
        ({"policy": None}, TypeError, "policy=None is not a policy"),
        ({"policy": NoLayout()}, TypeError, r"layout\(\.\.\.\) returned None"),
        ({"devices": ["cpu:0"]}, TypeError, r"devices has 'cpu:0'.*jax\.devices\(\)"),
        ({"groups": 4}, TypeError, "groups=4 must map"),
        ({"groups": {"env": 0}}, ValueError, r"groups\['env'\]=0 must be an integer of at least 1"),
        ({"groups": {"env": 3}}, ValueError, r"groups\['env'\]=3 does not divide the 8 entries of state"),
        ({"groups": {"emv": 2}}, ValueError, "axis 'emv', which no leaf of the state has.*'env'"),
        ({"axes": P(1)}, ValueError, "axes of state contain 1; name logical axes with strings"),
    ],
)
def test_options_that_are_none_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        msrl.compile(lambda s: (s, {}), jnp.ones(8), **{"policy": COARSE, "axes": P("env"), **options})


def test_groups_of_one_entry_divide_anything():
    program = msrl.compile(lambda s: (s, {}), jnp.ones(8), policy=COARSE, axes=P("env"), groups={"env": 1})
    assert program.run(jnp.ones(8), 1)[0].tolist() == [1.0] * 8
