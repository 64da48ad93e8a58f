import io
import re

import nbclient
import nbformat
import numpy as np
import pytest

from msrl_jax.fragments.support.terminal import significant
from msrl_jax.run import TensorBoard, Tick
from msrl_jax.run.evaluation.history import scalars
from msrl_jax.run.loop.callbacks import choose_display


def tick(step, **metrics):
    return Tick(step, step // 10, 100, {"step": step, "steps_per_second": 1234.0, **metrics}, lambda: None)


def test_a_pipe_gets_plain_lines_on_stderr(capsys):
    with choose_display("auto")("ppo CartPole-v1", 100) as show:
        show(tick(10, episode_return=7.0))
        show(tick(20, episode_return=8.0))
        show(tick(30, episode_return=8.0, eval_return=0.959))
        show(tick(100, episode_return=np.array([9.0, 11.0]), eval_return=np.nan))
    captured = capsys.readouterr()
    assert captured.out == ""
    # The second tick comes within a second of the first: a fast run does not flood a log. No evaluation is left out.
    assert captured.err.splitlines() == [
        "ppo CartPole-v1: compiling",
        "ppo CartPole-v1: 10/100 steps (10%)  1,234 steps/s  return 7.00",
        "ppo CartPole-v1: 30/100 steps (30%)  1,234 steps/s  return 8.00  eval 0.959",
        "ppo CartPole-v1: 100/100 steps (100%)  1,234 steps/s  return 10.0",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.959, "0.959"), (-0.0, "0"), (12.0, "12.0"), (500.0, "500"), (999.7, "1000"), (-1234.5, "-1234"), (1e-5, "1.00e-05")],
)
def test_numbers_have_three_digits(value, text):
    assert significant(value) == text


def test_returns_of_teams_stand_behind_their_sum(capsys):
    with choose_display("lines")("teams Tag", 100) as show:
        show(tick(100, **{"episode_return": 1.5, "episode_return/prey": -2.5, "episode_return/hunter": np.array([3.0, 5.0])}))
    assert capsys.readouterr().err.splitlines()[-1].endswith("return 1.50 (prey -2.50, hunter 4.00)")


def test_steps_and_speed_of_several_members_are_those_of_one(capsys):
    with choose_display("lines")("ppo CartPole-v1", 100, "steps", 4) as show:
        show(tick(50, episode_return=np.array([1.0, 2.0, 3.0, 4.0])))
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "ppo CartPole-v1: 50/100 steps per member (50%)  308 steps/s per member  return 2.50"


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with choose_display("auto")("ppo CartPole-v1", 100) as show:
        show(tick(90, episode_return=7.0, eval_return=8.0))
        show(tick(100, episode_return=7.0))
    text = terminal.getvalue()
    assert "100/100 steps" in text and "return 7.00" in text and "\x1b[" in text
    assert "90/100 steps (90%)  1,234 steps/s  return 7.00  eval 8.00\n" in re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", text)


class Dead(io.StringIO):
    """A stream whose reader has left."""

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize("display", ["bar", "lines"])
@pytest.mark.parametrize("stream", [Dead, lambda: None])
def test_a_display_that_cannot_be_written_is_dropped(display, stream, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream())
    with choose_display(display)("ppo CartPole-v1", 100) as show:
        show(tick(50))
        show(tick(100))
    choose_display("auto")


def test_steps_of_a_run_from_data_are_updates(capsys):
    with choose_display("lines")("iql CartPole-v1", 100, "updates") as show:
        show(Tick(100, 1, 100, {"steps_per_second": 10.0}, lambda: None, "updates"))
    assert capsys.readouterr().err.splitlines()[-1] == "iql CartPole-v1: 100/100 updates (100%)  10 updates/s"


def test_silence_is_silent(capfd):
    with choose_display(False)("title", 100) as show:
        show(tick(100))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_gets_a_display_that_updates():
    code = """
from msrl_jax.run import Tick
from msrl_jax.run.loop.callbacks import choose_display
with choose_display("auto")("ppo <CartPole>", 100) as show:
    for step in (50, 100):
        evaluated = {"eval_return": 8.0} if step == 50 else {}
        show(Tick(step, 1, 100, {"steps_per_second": 1234.0, "episode_return": 7.0} | evaluated, lambda: None))
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=120).execute()
    output, evaluated = notebook.cells[0].outputs
    assert output.output_type == "display_data" and "return 7.00  eval 8.00" in evaluated.data["text/html"]
    page = output.data["text/html"]
    assert "value='100'" in page and "return 7.00" in page and "&lt;CartPole&gt;" in page


def test_tensorboard_writes_every_metric(tmp_path):
    pytest.importorskip("tensorboardX")
    logger = TensorBoard(tmp_path)
    logger(tick(10, episode_return=np.array([1.0, 3.0]), eval_return=np.nan))
    logger.close()
    (events,) = tmp_path.iterdir()
    content = events.read_bytes()
    assert b"episode_return/1" in content and b"eval_return" not in content


def test_members_are_logged_with_their_mean():
    assert scalars({"loss": np.array([1.0, 3.0]), "step": 4}) == {"loss": 2.0, "loss/0": 1.0, "loss/1": 3.0, "step": 4.0}
