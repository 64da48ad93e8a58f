"""What users do with results and environments that they should not, or could not do before."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms

SMALL = {
    "num_envs": 4,
    "unroll_length": 4,
    "hidden_sizes": (4,),
    "eval_episodes": 0,
    "progress": False,
    "devices": jax.devices()[:1],
}


@pytest.fixture(scope="module")
def result():
    return msrl.train("a2c", total_steps=64, **SMALL)


def test_a_result_is_pickled_without_its_programs(result):
    obs = np.zeros((3, 4), np.float32)
    actions = result.act(obs, jax.random.key(1))
    copy = pickle.loads(pickle.dumps(result))
    assert copy.experiment == result.experiment and copy.status == result.status
    np.testing.assert_array_equal(copy.act(obs, jax.random.key(1)), actions)
    jax.tree.map(np.testing.assert_array_equal, copy.history, result.history)


def test_a_folder_is_not_a_result():
    export, record = lambda run: msrl.export(run, "x.onnx"), lambda run: msrl.data.record(run, steps=1)
    estimate = functools.partial(msrl.offline_evaluation.estimate_return, data="x.npz")
    for use in (msrl.plot, msrl.plot_lineage, msrl.plot_sweep, msrl.video, export, record, estimate):
        with pytest.raises(TypeError, match=r"'run' is not a result; load it: msrl\.(Sweep)?Result\.load\('run'\)"):
            use("run")


@pytest.mark.parametrize("of", ["jit", "vmap", "grad"])
def test_acting_is_not_traced(of, result):
    wrap = {"jit": jax.jit, "vmap": jax.vmap, "grad": lambda act: jax.grad(lambda obs: act(obs)[0])}[of]
    with pytest.raises(TypeError, match=r"run on the host, and cannot be traced by jax\.jit, vmap or grad"):
        wrap(result.probabilities if of == "grad" else result.act)(jnp.zeros((2, 4)) if of == "vmap" else jnp.zeros(4))


@pytest.mark.parametrize("key", [0, np.zeros(2, np.uint32), jax.random.split(jax.random.key(0))], ids=["int", "raw", "several"])
def test_acting_needs_one_typed_key(key, result):
    with pytest.raises(TypeError, match=r"act needs one typed key.*jax\.random\.key\(seed\)"):
        result.act(np.zeros(4, np.float32), key)


class Walk(msrl.envs.PointMaze):
    """Its step has the arguments of another library."""

    def step(self, state, action):  # type: ignore[override]
        return super().step(None, state, action)


def test_a_step_without_a_key_is_refused_with_the_arguments():
    with pytest.raises(TypeError, match=r"\.step\(state, action\) does not take the arguments \(key, state, action\)"):
        msrl.envs.vectorize(Walk(), 2)


def test_a_copy_does_not_hide_a_module(tmp_path):
    with pytest.raises(ValueError, match=r"json\.py would hide the module 'json'"):
        algorithms.copy("ppo", tmp_path / "json.py")


@pytest.mark.parametrize("of", [jax.jit, jax.grad])
def test_training_is_not_traced(of):
    with pytest.raises(TypeError, match=r"train runs on the host, and cannot be traced by jax\.jit, vmap or grad"):
        of(lambda rate: msrl.train("ppo", learning_rate=rate).history["loss"][-1])(jnp.ones(()))


def test_a_checkpoint_of_other_random_keys_says_so(tmp_path):
    run = tmp_path / "run"
    with jax.default_prng_impl("rbg"):
        msrl.train("a2c", total_steps=32, out=run, **SMALL)
        assert msrl.Result.load(run).description["devices"]["prng_impl"] == "rbg"
    with pytest.raises(ValueError, match=r"random keys of another implementation .*jax_default_prng_impl.*config\.json"):
        msrl.Result.load(run)
