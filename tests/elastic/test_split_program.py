"""What a learner and its actors share: two halves that are the iteration, and how parameters cross; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.elastic.parameter_messages import ActorSender, Packing, apply_changes
from msrl_jax.elastic.split_program import split_program
from tests.support.runs import plain
from tests.support.slow import slow_unless

SMALL = {"num_envs": 4, "unroll_length": 8, "hidden_sizes": (8,)}


def experiment(algo, env="CartPole-v1", **config):
    return msrl.Experiment(algorithm=msrl.algorithms.make(algo, SMALL | config), env=env, total_steps=1000)


@pytest.mark.long
@pytest.mark.parametrize("algo", ["impala", slow_unless(False, "ppo")])
def test_the_halves_are_the_iteration(algo):
    """Two iterations of both halves are two of plain `jax.jit`."""
    program = split_program(experiment(algo))
    halves, state = program.halves, program.experiment.initial_state()
    leaves, tree = jax.tree.flatten(state)
    private, expected, metrics, expected_metrics = program.initial_leaves(0), state, [], {}
    for _ in range(2):
        expected, expected_metrics = jax.jit(program.experiment.agent.iteration)(expected)
        private, sent = program.act(private, [leaves[i] for i in halves.published])
        leaves, metrics = program.learn(leaves, jax.device_get(sent))
    for i, x in zip(halves.private, private, strict=True):
        leaves[i] = x
    for (path, x), y in zip(jax.tree.leaves_with_path(expected), leaves, strict=True):
        np.testing.assert_allclose(plain(y), plain(x), rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))
    found = jax.tree.unflatten(program.metrics, metrics)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, expected_metrics)
    assert jax.tree.structure(tree.unflatten(leaves)) == jax.tree.structure(state)


def test_what_crosses_is_the_trajectory_and_the_parameters():
    halves = split_program(experiment("impala")).halves
    labels = [halves.schedule.inputs[i][0].label for i in (*halves.private, *halves.published)]
    own, read = labels[: len(halves.private)], labels[len(halves.private) :]
    assert all(".env_state" in x or x.endswith((".actor_keys", ".obs")) for x in own)
    assert all(".params" in x or x == "state.version" for x in read)
    assert (8, 4, 4) in [x.shape for x in halves.sent_kinds]  # observations [T, E, 4]


def test_equal_programs_have_equal_fingerprints():
    first, second = (split_program(experiment("impala")).halves.fingerprint for _ in range(2))
    assert first == second
    assert first != split_program(experiment("impala", unroll_length=9)).halves.fingerprint
    assert first != split_program(experiment("impala", activation="relu")).halves.fingerprint


@pytest.mark.parametrize(
    ("algo", "config", "why"),
    [
        ("dqn", {"replay": "replay:256,learning_starts=32", "batch_size": 16}, ".*buffer .insert. keeps .*, or train impala"),
        ("impala", {"replay_batches": 2}, ".*sample_batches. keeps .*, or train impala, ppo or a2c with their defaults$"),
        ("es", {}, "random keys .* cross between its actors and its learner"),
        ("ppo", {"normalize_observations": True, "num_minibatches": 2}, "each actor would normalize with its own statistics"),
    ],
)
def test_what_actors_apart_cannot_do_is_refused_in_one_sentence(algo, config, why):
    config = {name: x for name, x in (SMALL | config).items() if hasattr(msrl.algorithms.get(algo), name)}
    given = msrl.Experiment(algorithm=msrl.algorithms.make(algo, config), total_steps=10_000)
    with pytest.raises(ValueError, match=f"^{algo} on CartPole-v1 cannot learn from actors in other processes: {why}"):
        split_program(given)


def test_members_and_parameters_as_data_are_refused():
    with pytest.raises(ValueError, match="it has 2 members, whose data would come from several policies"):
        split_program(msrl.Experiment(algorithm=msrl.algorithms.IMPALA(), seeds=2))
    with pytest.raises(ValueError, match="set them in the name of the environment"):
        split_program(msrl.Experiment(algorithm=msrl.algorithms.IMPALA(), env_params={"length": 1.0}))


KINDS = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in [((30, 20), "float32"), ((), "uint32"), ((40,), "float32")]]


def test_only_what_changed_in_bfloat16_crosses_with_the_delta_codec():
    """The actor has what `"bfloat16"` gives, bit by bit, whether all words crossed or only those that changed."""
    rng, packing = np.random.default_rng(0), Packing.from_codec("delta(4, 3)", KINDS)
    sender, arrays, held, sizes = ActorSender(packing), [rng.normal(size=x.shape).astype(x.dtype) for x in KINDS], [], []
    for step in range(6):
        arrays = [x.copy() for x in arrays]
        arrays[0][step, : 2 if step != 4 else 20] += 1  # two words of 640
        if step == 4:
            arrays[0] += 1
        arrays[1] = np.uint32(step)
        changed, sent = sender.message(packing.pack(arrays))
        held = sent if changed is None else apply_changes(packing, held, sent)
        for x, kind, got in zip(arrays, KINDS, packing.unpack(held), strict=True):
            expected = np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(kind.dtype)) if x.ndim else x
            np.testing.assert_array_equal(got, expected)
        sizes.append(changed)
    assert sizes == [None, 2, None, 2, None, None]  # the first; every third; the fifth, in which most words changed
