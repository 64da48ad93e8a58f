"""An exported policy acts as the agent does: on all observations, from any batch, in another process without this package."""

import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.cli import main
from msrl_jax.run.outputs.export import exported_policy, write
from tests.support.acting import acting
from tests.support.slow import slow_unless

ROWS = 1000
TEAM = "jaxmarl:MPE_simple_spread_v3"
LOCK = "tests.support.lock:Lock"
OTHERS = {
    "recurrent_ppo+lstm": {"core": "lstm:16"},
    "ppo+normal": {"normalize_observations": True},
    "mappo+gru": {"core": "gru:16"},
    "dqn+images": {"network": "cnn", "replay.capacity": 256},
}
FAST = [("ppo+normal", "Pendulum-v1"), ("r2d2", "CartPole-v1")]
SLOW = [
    ("self_play", "KuhnPoker"),
    ("sac+qr", "Pendulum-v1"),
    ("dqn+c51", "CartPole-v1"),
    ("ppo", "CartPole-v1"),
    ("ppo", LOCK),
    ("recurrent_ppo+lstm", "CartPole-v1"),
    ("recurrent_ppo+min_gru", "Pendulum-v1"),
    ("recurrent_ppo+lru", "CartPole-v1"),
    ("recurrent_ppo+gtrxl", "CartPole-v1"),
    ("recurrent_ppo+own", "CartPole-v1"),
    ("a2c", "Pendulum-v1"),
    ("impala", "CartPole-v1"),
    ("impala+memory", "CartPole-v1"),
    ("a3c", "CartPole-v1"),
    ("es", "Pendulum-v1"),
    ("pqn", "CartPole-v1"),
    ("dqn", "CartPole-v1"),
    ("dqn+qr", "CartPole-v1"),
    ("dqn+iqn", "CartPole-v1"),
    ("dqn", "Catch-bsuite"),
    ("ppo", "Breakout-MinAtar"),
    ("apex_dqn", "CartPole-v1"),
    ("muzero", "CartPole-v1"),
    ("sac", "Pendulum-v1"),
    ("sac", "CartPole-v1"),
    ("td3", "Pendulum-v1"),
    ("td3+c51", "Pendulum-v1"),
    ("ddpg", "Pendulum-v1"),
    ("sac+cross_q", "Pendulum-v1"),
    ("sac+gru", "Pendulum-v1"),
    ("bc", "CartPole-v1"),
    ("bc", "Pendulum-v1"),
    ("cql", "Pendulum-v1"),
    ("iql", "Pendulum-v1"),
    ("iql", "CartPole-v1"),
    ("ppo+linen", "CartPole-v1"),
    ("dqn+equinox", "CartPole-v1"),
    ("sac+nnx", "Pendulum-v1"),
    ("ippo", TEAM),
    ("mappo", TEAM),
    ("mappo+gru", TEAM),
    ("qmix", TEAM),
    ("vdn", TEAM),
    ("maddpg", TEAM),
    ("self_play", "pgx:tic_tac_toe"),
    ("alphazero", "pgx:tic_tac_toe"),
    ("a2c+privileged", "tests.support.privileged:cartpole"),
]
CASES = [slow_unless(case in FAST, *case) for case in (*FAST, *SLOW)]
OFTEN = [("ppo+normal", "Pendulum-v1", True), ("r2d2", "CartPole-v1", False)]
PROGRAMS = [slow_unless((*case, sample) in OFTEN, *case, sample) for case in (*FAST, *SLOW) for sample in (False, True)]


def policy(name, env):
    return acting(name, env, **OTHERS.get(name, {}))


def observations(behavior, count=ROWS):
    """Observations with a leading dimension; at least one action is legal in each."""

    def values(t, seed):
        rng = np.random.default_rng(seed)
        if t.dtype == bool:
            legal = rng.random((count, *t.shape)) < 0.5
            return legal | (np.arange(t.shape[-1]) == 0)
        shape = (count, *t.shape)
        return (rng.integers(0, 2, shape) if np.issubdtype(t.dtype, np.integer) else rng.normal(size=shape)).astype(t.dtype)

    leaves, tree = jax.tree.flatten(behavior.observation_type)
    return jax.tree.unflatten(tree, [values(t, seed) for seed, t in enumerate(leaves)])


# These ask how many observations there are.
COUNTING = ("ppo+linen", "sac+nnx")


def two_steps(behavior, state, key=None):
    """Actions of two steps on the same observations."""
    obs, act = observations(behavior), jax.jit(behavior.act_with_carry)
    first, carry = act(state, obs, behavior.initial_carry(ROWS), key)
    return obs, (first, act(state, obs, carry, key)[0])


def two_calls(call, inputs, obs, **given):
    """The same by a file: `call` maps arrays by name to arrays by name."""
    arrays = dict(zip(inputs, jax.tree.leaves(obs), strict=False))
    carries = {name: np.zeros((ROWS, *shape[1:]), dtype) for name, (dtype, shape) in inputs.items() if "carry" in name}
    first = call(arrays | carries | given)
    again = call(arrays | {name: first[f"next_{name}"] for name in carries} | given)
    return first["action"], again["action"]


def parsed(about):
    """Names of inputs to dtypes and shapes, as a file tells them; `B` stays."""
    split = {name: text[:-1].partition("[")[::2] for name, text in about["inputs"].items()}
    number = lambda n: int(n) if n.isdigit() else n
    return {name: (dtype, [number(n) for n in shape.split(", ") if n]) for name, (dtype, shape) in split.items()}


@pytest.mark.parametrize(("name", "env", "sample"), PROGRAMS)
def test_a_program_acts_as_the_agent(name, env, sample, tmp_path):
    behavior, state = policy(name, env)
    key = jax.random.key(7) if sample else None
    obs, expected = two_steps(behavior, state, key)
    file = write(
        exported_policy(behavior, state, sample), tmp_path / "policy.jaxexport", {}, ROWS if name in COUNTING else None
    )
    loaded = jax.export.deserialize(bytearray(file.read_bytes()))
    inputs = parsed(json.loads(loaded.fun_name))
    given = {"key": jax.random.key_data(key)} if sample else {}
    assert inputs.pop("key", None) == (("uint32", [2]) if sample else None)
    assert set(loaded.platforms) == {"cpu", "cuda", "tpu"}
    actions = two_calls(lambda arrays: loaded.call(**arrays), inputs, obs, **given)
    for got, want in zip(actions, expected, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


# Under one per million of 16 units, which is what products in another order differ by.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


@pytest.mark.long
@pytest.mark.parametrize(("name", "env"), CASES)
def test_a_model_acts_as_the_agent(name, env, tmp_path):
    pytest.importorskip("jax2onnx", reason="ONNX files need jax2onnx and onnxruntime")
    runtime = pytest.importorskip("onnxruntime")
    behavior, state = policy(name, env)
    exported, file = exported_policy(behavior, state, False), tmp_path / "policy.onnx"
    if "lru" in name:  # ONNX has no complex numbers
        with pytest.raises(ValueError, match=r"jax2onnx cannot express this policy .*export it as \.jaxexport"):
            write(exported, file, {}, None)
        assert not list(tmp_path.iterdir())
        return
    obs, expected = two_steps(behavior, state)
    session = runtime.InferenceSession(write(exported, file, {}, ROWS if name in COUNTING or env == LOCK else None))
    about = json.loads(session.get_modelmeta().description)
    outputs, named = list(about["outputs"]), {x.name for x in session.get_inputs()}
    call = lambda arrays: session.run(outputs, {k: np.asarray(x) for k, x in arrays.items() if k in named})
    actions = two_calls(lambda arrays: dict(zip(outputs, call(arrays), strict=True)), parsed(about), obs)
    for got, want in zip(actions, expected, strict=True):
        assert got.dtype == want.dtype
        if np.issubdtype(got.dtype, np.integer):
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_allclose(got, want, **CLOSE)


@pytest.mark.long
def test_models_are_made_one_at_a_time(trained, tmp_path):
    """jax2onnx replaces functions of JAX while it converts: two conversions at once would leave them replaced."""
    pytest.importorskip("jax2onnx", reason="ONNX files need jax2onnx and onnxruntime")
    before = {name: getattr(jnp, name) for name in dir(jnp)}
    with ThreadPoolExecutor(3) as pool:
        files = list(pool.map(lambda i: msrl.export(trained, tmp_path / f"{i}.onnx"), range(3)))
    assert len({file.read_bytes() for file in files}) == 1
    assert [name for name, value in before.items() if getattr(jnp, name) is not value] == []


WITHOUT_THE_PACKAGE = """
import json, sys
sys.modules["msrl_jax"] = None  # an import of it would fail
import jax, numpy as np
policy = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
about, obs = json.loads(policy.fun_name), np.load(sys.argv[2])
print(json.dumps([about, [int(policy.call(obs=row[None])["action"][0]) for row in obs]]))
"""


@pytest.mark.long
def test_a_file_of_a_run_acts_in_a_process_that_has_jax_alone(trained, run_folder, tmp_path, capsys):
    file = tmp_path / "policy.jaxexport"
    assert main(["export", str(run_folder), str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(file)}
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.save(tmp_path / "obs.npy", obs)
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(file), str(tmp_path / "obs.npy")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    about, actions = json.loads(ended.stdout)
    assert actions == trained.act(obs).tolist()
    assert about == {
        "algorithm": "ppo",
        "env": "CartPole-v1:max_steps_in_episode=30",
        "env_params": None,
        "versions": trained.description["versions"],
        "run": str(run_folder),
        "member": 0,
        "seed": 3,
        "steps": 6 * 64,
        "sample": False,
        "inputs": {"obs": "float32[B, 4]"},
        "outputs": {"action": "int32[B]"},
    }


def test_what_cannot_be_exported_is_refused(trained, tmp_path):
    with pytest.raises(ValueError, match=r"policy\.txt must end in \.jaxexport or \.onnx"):
        msrl.export(trained, tmp_path / "policy.txt")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ValueError, match="is a folder; name a file"):
        msrl.export(trained, tmp_path / "folder.onnx")
    (tmp_path / "folder.onnx").rmdir()
    with pytest.raises(ValueError, match="does not exist; create it first"):
        msrl.export(trained, tmp_path / "none" / "policy.jaxexport")
    with pytest.raises(ValueError, match="member=1: this run has only member 0"):
        msrl.export(trained, tmp_path / "policy.jaxexport", member=1)
    with pytest.raises(ValueError, match=r"export a sampling policy as \.jaxexport"):
        msrl.export(trained, tmp_path / "policy.onnx", sample=True)
    with pytest.raises(ValueError, match="batch=0: use an integer of at least 1"):
        msrl.export(trained, tmp_path / "policy.jaxexport", batch=0)
    assert not list(tmp_path.iterdir())


def test_a_network_that_needs_to_know_how_many_there_are(tmp_path):
    """A symbolic number of rows is no Python number; a given one is."""
    behavior, state = policy("ppo+normal", "Pendulum-v1")
    act = behavior.agent.act

    def knows(state, obs, key, carry):
        action, carry = act(state, obs, key, carry)
        return action * (len(obs) > 2 and int(obs.shape[0]) < 9), carry

    behavior = dataclasses.replace(behavior, agent=dataclasses.replace(behavior.agent, act=knows))
    exported = exported_policy(behavior, state, False)
    with pytest.raises(ValueError, match=r"cannot be traced for an arbitrary batch size \(.*\); give one, such as batch=1"):
        write(exported, tmp_path / "policy.jaxexport", {}, None)
    file = write(exported, tmp_path / "policy.jaxexport", {}, 4)
    obs = observations(behavior, 4)
    found = jax.export.deserialize(bytearray(file.read_bytes())).call(obs=obs)["action"]
    np.testing.assert_array_equal(found, jax.jit(behavior.act_with_carry)(state, obs, ())[0])
