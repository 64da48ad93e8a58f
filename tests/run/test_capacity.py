"""What memory cannot hold is refused before it runs, with the bytes; what would fit is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli
from msrl_jax.cli import command_line
from msrl_jax.fragments.runtime import memory
from msrl_jax.fragments.runtime.executables import MemoryCheckedJit
from msrl_jax.fragments.runtime.memory import program_bytes

SMALL = {"unroll_length": 4, "hidden_sizes": (8,)}


def square(x):
    return jnp.sort(x @ x.T)[0]


def limit_to(monkeypatch, nbytes):
    monkeypatch.setattr(memory, "_limits_of_container", lambda: [nbytes])


def test_a_program_is_refused_from_the_first_byte_too_many(monkeypatch):
    x = jnp.ones((64, 64))
    taken = program_bytes(jax.jit(square).lower(x).compile())
    assert taken >= 2 * 64 * 64 * 4  # the argument and its square
    limit_to(monkeypatch, taken)
    np.testing.assert_array_equal(MemoryCheckedJit(jax.jit(square), "it", "")(x), np.full(64, 64.0))
    limit_to(monkeypatch, taken - 1)
    with pytest.raises(ValueError, match=f"it takes {taken:,} bytes of .*, which has {taken - 1:,} in all. Use less"):
        MemoryCheckedJit(jax.jit(square), "it", "Use less")(x)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["GPUOnly", pytest.param("SingleLearnerCoarse", marks=pytest.mark.slow)])
def test_a_run_whose_state_fits_and_whose_programs_do_not_is_refused(monkeypatch, policy):
    """The state of an environment takes less than 100 bytes, its trajectory of 4 steps and what is made of it more."""
    limit_to(monkeypatch, 3_000_000)
    with pytest.raises(ValueError, match=r"program .* takes [\d,]+ bytes of .*The largest array .* in '\w+' \([\d,]+ bytes\)"):
        msrl.train("a2c", "CartPole-v1", policy=policy, num_envs=2**14, total_steps=10**6, eval_episodes=0, **SMALL)


def test_evaluations_and_recordings_are_refused_in_one_line(trained, run_folder, tmp_path, capsys):
    file = str(tmp_path / "x.npz")
    for command, message in (
        (["evaluate", str(run_folder), "--episodes", "1e10"], "an evaluation of 10,000,000,000 episodes at once takes"),
        (["record", str(run_folder), "--steps", "1e11", "--out", file], "a data set of 100,000,000,000 rows"),
    ):
        assert cli.main(command) == command_line.BAD_INPUT
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "x.npz").exists()


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_limits_of_containers_count(tmp_path):
    """Version 2: the group's own limit and those above it; version 1 likewise, in its own folder."""
    write(tmp_path, "proc/self/cgroup", "4:cpu,memory:/job/a\n3:cpuset:/\n0::/slice/b\n")
    assert memory._limits_of_container(tmp_path) == []
    write(tmp_path, "sys/fs/cgroup/slice/b/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/slice/memory.max", "3000\n")
    write(tmp_path, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2000\n")
    write(tmp_path, "sys/fs/cgroup/memory/other/memory.limit_in_bytes", "1\n")
    assert sorted(memory._limits_of_container(tmp_path)) == [2000, 3000]
    assert memory._limits_of_container(tmp_path / "no such system") == []
