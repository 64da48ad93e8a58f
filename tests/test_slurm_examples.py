"""The SLURM examples of a page do as the page says: run in a shell, with programs that stand in for SLURM's."""

import os
import re
import shlex
from pathlib import Path

import pytest

from msrl_jax.cli.command import parse
from msrl_jax.cli.commands import COMMANDS
from tests.support import processes

PAGE = Path(__file__).parents[1] / "docs" / "cluster.md"
PROGRAMS = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "sbatch": 'echo "$MSRL_JAX_ACTORS_KEY" >> keys; SLURM_JOB_ID=7 sh -c "${!#}"; echo $? >> codes',  # the script of --wrap
    "scontrol": 'echo "$*" >> requeued',
    "msrl-jax": 'echo "$*" >> ran; [ "$1" = act ] || exit $CODE',
}


@pytest.fixture
def run(tmp_path):
    """Runs the SLURM example of a section, in which training ends with a code; returns the code of the script and its files."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(section, code):
        text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        (example,) = re.findall(r"\*\*SLURM\*\*.*?^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_ID": "7"}
        script = example.replace("/shared", str(tmp_path / "shared"))
        (tmp_path / "shared").mkdir()
        done = processes.run(["bash", "-c", script], env=environment, cwd=tmp_path)
        assert done.stderr == ""
        files = ("ran", "requeued", "codes", "keys", "shared/learner")
        return done.returncode, {name: (tmp_path / name).read_text() for name in files if (tmp_path / name).exists()}

    return run


def parsed(ran):
    """The arguments of the commands, as the command line understands them."""
    return [parse(words[0], COMMANDS[words[0]], words[1:]).values for words in map(shlex.split, ran.splitlines())]


@pytest.mark.parametrize("code", [0, 2, 75, 143])
def test_a_job_goes_into_the_queue_again_if_its_run_reached_the_time_limit_and_only_then(run, code):
    ended, written = run("Several processes", code)
    assert ended == code and written.get("requeued") == ("requeue 7\n" if code == 75 else None)
    assert parsed(written["ran"])[0]["distributed"]


@pytest.mark.parametrize("code", [0, 75, 143])
def test_a_learner_says_where_it_is_and_its_actors_look_there(run, tmp_path, code):
    _, written = run("Elastic actors", code)
    assert written["codes"] == f"{code}\n0\n" and written.get("requeued") == ("requeue 7\n" if code == 75 else None)
    assert re.fullmatch(r"\S+:7000\n", written["shared/learner"])
    assert written["keys"] == 2 * f"{tmp_path}/shared/actors.pem\n"
    learner, actor = parsed(written["ran"])
    assert learner["actors_at"] == "0.0.0.0:7000" and tuple(actor["addresses"]) == (f"{tmp_path}/shared/learner",)
