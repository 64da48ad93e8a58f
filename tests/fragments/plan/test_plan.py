"""The table of a plan merges rows of arrays that cross alike; its data are complete."""

from msrl_jax.fragments.plan.plan import Crossing, Plan


def crossing(value, dtype="float32", shape=(4,), source="learners", destination="actors", times=1, codec=""):
    nbytes = 64 if codec else 256
    return Crossing(value, dtype, shape, source, destination, nbytes, times, codec, unpacked_bytes=256)


def plan(*crossings):
    return Plan("P()", {"actors": ("cpu:0",)}, (), 0, False, (), (), crossings, (), ())


def rows(*crossings):
    """The rows of the table, cells joined by one space."""
    text = str(plan(*crossings)).split("crossing placements")[1].split("\n\n")[0]
    return [" ".join(line.split()) for line in text.splitlines()[2:]]


def test_leaves_of_a_subtree_share_a_row():
    layers = [crossing(f"state.params['params']['layer_{i}']['{part}']") for i in (0, 1) for part in ("bias", "kernel")]
    assert rows(*layers) == ["state.params (4 leaves) float32 learners actors 1.0 KiB 1"]
    flat = [crossing("state.params.layers[0].weight"), crossing("state.params.layers[1].weight")]
    assert rows(*flat) == ["state.params.layers (2 leaves) float32 learners actors 512 B 1"]
    nested = [crossing(f"gradients()[0]['params']['{name}']") for name in "ab"]
    assert rows(*nested) == ["gradients()[0] (2 leaves) float32 learners actors 512 B 1"]
    of_dicts = [crossing(f"state['params']['{name}']") for name in "ab"]
    assert rows(*of_dicts, crossing("state['x']"))[0].startswith("state['params'] (2 leaves) ")


def test_fields_keep_their_rows():
    fields = [crossing(f"env_step()[1].{name}") for name in ("obs", "reward")] + [crossing("act()[0]"), crossing("act()[1]")]
    assert [row.split()[0] for row in rows(*fields)] == ["env_step()[1].obs", "env_step()[1].reward", "act()[0]", "act()[1]"]
    assert rows(crossing("state.params['w']")) == ["state.params['w'] float32[4] learners actors 256 B 1"]


def test_leaves_that_differ_in_way_times_type_or_codec_are_apart():
    leaf = "state.params['{}']".format
    apart = [
        crossing(leaf("a")),
        crossing(leaf("b"), times=2),
        crossing(leaf("c"), destination="envs"),
        crossing(leaf("d"), source="server"),
        crossing(leaf("e"), dtype="int32"),
        crossing(leaf("f"), codec="bfloat16"),
        crossing(leaf("g") + " (delayed 1)"),
    ]
    assert len(rows(*apart)) == 7
    assert [row.split()[0] for row in rows(*apart)] == [leaf(name) for name in "abcdefg"]


def test_packed_values_show_the_bytes_before_and_after():
    packed = [crossing("state.params['a']", codec="uint8"), crossing("state.params['b']", codec="uint8")]
    found = rows(*packed, crossing("act()", times=2))
    assert found == [
        "state.params (2 leaves) float32 learners actors 128 B 1 uint8 512 B",
        "act() float32[4] learners actors 256 B 2 - 256 B",
    ]
    assert "crossing placements (640 B per iteration, 1.0 KiB unpacked)" in str(plan(*packed, crossing("act()", times=2)))


def test_data_hold_every_leaf():
    leaves = [crossing(f"state.params['{name}']", shape=(i,)) for i, name in enumerate("abc")]
    data = plan(*leaves).to_dict()
    assert [(c["value"], c["shape"]) for c in data["crossings"]] == [(c.value, c.shape) for c in leaves]
    assert data["bytes_crossing"] == data["unpacked_bytes_crossing"] == 3 * 256
