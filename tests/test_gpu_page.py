"""The benchmark of one GPU, with the smallest sizes on a CPU: every row can be measured, and the page is written."""

import gc
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from benchmarks import gpu

PAGE = "# On a GPU\n\n<!-- gpu: begin -->\nold\n<!-- gpu: end -->\n"


@pytest.mark.long
def test_tiny_rows_are_measured_and_the_page_is_written(tmp_path, capsys):
    page, record = tmp_path / "gpu.md", tmp_path / "gpu.json"
    page.write_text(PAGE)
    words = ["ppo CartPole-v1 4 x 128, 64 seeds", "PBT of 16"]
    gpu.main(["--tiny", "--repeats", "1", "--seconds", "0.05", "--json", str(record), "--docs", str(page), "--only", *words])
    rows = json.loads(record.read_text())["rows"]
    assert len(rows) == 2 and all(row["rate"] > 0 and row["compile_seconds"] > 0 for row in rows)
    text = page.read_text()
    assert "old" not in text and all(f"| {row['label']} | {row['rate']:,.0f} |" in text for row in rows)
    assert "PBT of 4 members" in text and "2 seeds" in text


@pytest.mark.slow
@pytest.mark.parametrize("row", gpu.ROWS, ids=lambda row: row.label)
def test_every_row_can_be_measured(row):
    try:
        assert gpu.measure(gpu.shrunk(row), 1, 0.05)["rate"] > 0
    except RuntimeError as error:
        if "connect to the internet" not in str(error):
            raise
        gc.collect()  # what git was started with
        pytest.skip(str(error))


def test_what_is_not_installed_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "missing", lambda row: "pip install it")
    record = tmp_path / "gpu.json"
    gpu.main(["--tiny", "--json", str(record), "--only", "brax:ant"])
    assert "Not installed: ppo brax:ant 8 x 8 (pip install it)." in capsys.readouterr().err and not record.exists()


def test_a_machine_without_a_gpu_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--json", str(tmp_path / "gpu.json")])
    assert "a GPU is measured here" in capsys.readouterr().err
