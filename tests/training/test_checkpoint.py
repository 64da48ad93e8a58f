from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msrl_jax.training.checkpoint import load_state, save_state


class State(NamedTuple):
    params: dict
    keys: jax.Array
    other: tuple


@pytest.fixture
def state():
    return State(
        params={"kernel": jnp.arange(12.0).reshape(3, 4), "a.b": {"c": jnp.int8(3)}, "a": {"b.c": jnp.bool(True)}},
        keys=jax.random.split(jax.random.key(0), 8),
        other=(jax.random.key(1, impl="rbg"), jnp.ones((2, 0)), jnp.bfloat16([1.5]), None),
    )


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_any_state_round_trips(state, tmp_path):
    save_state(tmp_path / "state", state)
    assert_same(load_state(tmp_path / "state", jax.eval_shape(lambda: state)), state)


def test_restored_keys_draw_the_same_numbers(state, tmp_path):
    save_state(tmp_path / "state", state)
    loaded = load_state(tmp_path / "state", state)
    np.testing.assert_array_equal(jax.random.normal(loaded.keys[5]), jax.random.normal(state.keys[5]))
    np.testing.assert_array_equal(jax.random.normal(loaded.other[0]), jax.random.normal(state.other[0]))


def test_a_state_on_eight_devices_is_read_onto_one(state, tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("env",))
    specs = jax.tree.map(lambda x: P("env") if x.shape[:1] == (8,) else P(), state)
    spread = jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    save_state(tmp_path / "state", spread)
    loaded = load_state(tmp_path / "state", jax.eval_shape(lambda: state), jax.devices()[2])
    assert_same(loaded, state)
    assert all(x.devices() == {jax.devices()[2]} for x in jax.tree.leaves(loaded) if x.size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s._replace(params={"kernel": s.params["kernel"]}), r"state\.params\['a'\].* only in the checkpoint"),
        (lambda s: s._replace(params=s.params | {"bias": jnp.ones(3)}), r"state\.params\['bias'\] is not in the checkpoint"),
        (lambda s: s._replace(params=s.params | {"kernel": jnp.ones(3)}), r"is float32\[3, 4\] there and float32\[3\] here"),
        (lambda s: s._replace(params=s.params | {"kernel": jnp.ones((3, 4), jnp.int32)}), r"float32\[3, 4\] .* int32\[3, 4\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_says_where(state, tmp_path, change, message):
    save_state(tmp_path / "state", state)
    with pytest.raises(ValueError, match=message):
        load_state(tmp_path / "state", change(state))
