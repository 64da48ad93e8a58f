import statistics

import jax
import pytest

from msrl_jax import algorithms
from msrl_jax.algorithms import PPO
from msrl_jax.cli import main
from msrl_jax.report import bench as benchmark
from msrl_jax.report.bench import bench, format_table, interleave
from msrl_jax.run import Experiment


class Recorder:
    """Notes when it is its turn."""

    def __init__(self, name, turns):
        self.name, self.turns = name, turns

    def run(self, seconds):
        self.turns.append((self.name, seconds))
        return float(len(self.turns))


def test_runs_are_interleaved_and_the_order_alternates():
    turns = []
    rates = interleave([Recorder("a", turns), Recorder("b", turns)], 0.5, 3)
    assert [name for name, _ in turns] == ["a", "b", "b", "a", "a", "b"]
    assert {seconds for _, seconds in turns} == {0.5}
    assert rates == [(1.0, 4.0, 5.0), (2.0, 3.0, 6.0)]


@pytest.fixture(scope="module")
def measurements(measured):
    return measured[0]


SMALL = {
    "algo": ("a2c",),
    "num_envs": (8,),
    "unroll_length": (8,),
    "seconds": 0.05,
    "hidden_sizes": (8,),
    "normalize_observations": True,
}


@pytest.fixture(scope="module")
def measured(one_device):
    """The measurements, and the lines before them."""
    lines = []
    return bench(**SMALL, against="jit", devices=one_device, note=lines.append), lines


@pytest.mark.long
def test_a_line_says_what_compiles_and_what_is_timed(measured):
    (measurement,), lines = measured
    assert lines == [
        "compiling a2c CartPole-v1, 8 envs x 8 steps, GPUOnly ...",
        "measuring 3 runs of about 0.05 s and the same number of jax.jit ...",
        measurement,
    ]


@pytest.mark.long
def test_a_measurement_is_the_median_of_its_runs(measurements):
    (m,) = measurements
    assert len(m.runs) == len(m.jit_runs) == 3
    assert m.steps_per_second == statistics.median(m.runs) > 0
    assert m.updates_per_second == pytest.approx(m.steps_per_second / 64)  # 8 steps of 8 environments
    assert m.ratio == m.steps_per_second / statistics.median(m.jit_runs)
    assert m.compile_seconds > 0 and m.num_envs == 8 and m.unroll_length == 8


@pytest.mark.long
def test_the_table_has_a_line_per_measurement(measurements, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shared, header, line = format_table(measurements).splitlines()
    assert shared.startswith("env CartPole-v1") and header.split()[:3] == ["algorithm", "steps/s", "updates/s"]
    (m,) = measurements
    steps, updates = (float(x.replace(",", "")) for x in line[header.index("steps/s") :].split()[:2])
    assert (steps, updates) == (pytest.approx(m.steps_per_second, abs=0.5), pytest.approx(m.updates_per_second, rel=0.01))
    assert f"{m.ratio:.3f}" in line


@pytest.fixture(scope="module")
def driven(measurements):
    """The measurement of a policy that the host drives, after that of a fused loop."""
    policies = ["SingleLearnerFine:learners=1"]
    return [*measurements, *bench(**SMALL, policy=policies, repeats=1, devices=jax.devices()[:3])]


@pytest.mark.long
def test_the_line_and_the_table_show_what_the_host_dispatches(driven, monkeypatch):
    fused, loop = driven
    assert "dispatch" not in str(fused)
    assert f"; dispatch: {loop.instructions} instructions per iteration, " in str(loop) and "(a jitted call: " in str(loop)
    monkeypatch.setenv("COLUMNS", "250")
    _, header, first, second = format_table(driven).splitlines()
    at = header.index("instructions")
    assert first[at:].startswith("one program") and second[at:].split()[:2] == [
        str(loop.instructions),
        f"{loop.instruction_microseconds:.1f}",
    ]
    assert "instructions" not in format_table([fused])


@pytest.fixture
def planned(monkeypatch):
    """Instead of measuring, notes the configs that would be measured."""
    configs = {}
    monkeypatch.setattr(benchmark, "format_table", lambda measurements: "")
    monkeypatch.setattr(benchmark.Experiment, "compile", lambda *arguments: None)
    monkeypatch.setattr(benchmark, "measure", lambda e, policy, **_: configs.update({e.name: e.algorithm}))
    return configs


@pytest.mark.parametrize(
    ("env", "algos"), [("CartPole-v1", ("a2c", "apex_dqn", "dqn", "ppo", "r2d2")), ("Pendulum-v1", ("ddpg", "sac", "td3"))]
)
def test_every_algorithm_has_its_own_defaults(env, algos, planned):
    bench(algos, (env,))
    for algo in algos:
        assert planned[algo] == algorithms.get(algo)()


def test_every_combination_of_the_grid_is_measured(monkeypatch):
    def noted(experiment, policy, **options):
        return experiment.name, type(policy).__name__, experiment.algorithm.num_envs, experiment.algorithm.unroll_length

    monkeypatch.setattr(benchmark.Experiment, "compile", lambda *arguments: None)
    monkeypatch.setattr(benchmark, "measure", noted)
    found = bench(("a2c", "ppo"), policy=("GPUOnly", "Central"), num_envs=(8, 16), unroll_length=(64, 128))
    assert found == [(a, p, n, t) for a in ("a2c", "ppo") for p in ("GPUOnly", "Central") for n in (8, 16) for t in (64, 128)]


@pytest.mark.parametrize("algos", [("ppo", "dqn"), ("dqn", "ppo")])
def test_a_flag_that_equals_a_default_counts_for_all_algorithms(algos, planned):
    default = algorithms.get("ppo")().learning_rate
    assert algorithms.get("dqn")().learning_rate != default
    assert main(["bench", "--algo", *algos, "--learning-rate", str(default), "--num-envs", "8"]) == 0
    assert {config.learning_rate for config in planned.values()} == {default}
    assert {config.num_envs for config in planned.values()} == {8}


MISTAKES = [
    {"policy": ("GPUOnly", "Nowhere")},
    {"num_envs": (8, 0)},
    {"repeats": 0},
    {"seconds": float("nan")},
    {"algo": ()},
    {"algo": ("ppo", "cql")},
    {"algo": (Experiment(algorithm=PPO()),)},
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_in_the_grid_stops_it_before_anything_is_measured(mistake):
    measured = []
    with pytest.raises(ValueError):
        bench(**{"num_envs": (8,), **mistake}, note=measured.append)
    assert measured == []
