"""The collectives benchmark through the command line: what there is, a gate that fails, figures, and a comparison."""

from pathlib import Path

import pytest

from mlbench_cli.app import run
from tests.contract.clients import answer

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("home")


def test_a_task_shows_its_collectives_with_their_formulas(capsys: Captured) -> None:
    assert run(["tasks", "allreduce"]) == 0
    shown = capsys.readouterr().out
    assert "  all_reduce      S = the buffer                                busbw = algbw * 2 (k - 1) / k" in shown
    assert "24 from 8 to 67108864" in shown
    document = answer(capsys, "tasks", "allreduce")
    assert sum("busbw = algbw" in note for note in document["notes"]) == 8
    assert document["presets"]["collectives"]["collectives"][-1] == "bidirectional"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("sizes=8B:4B", 'The parameter "sizes": "8B:4B" ends below its beginning.'),
        ("sizes=lots", 'The parameter "sizes": "lots" is not a size; write 8B:64MiB:x2'),
        ("collectives=allreduce", 'Did you mean "all_reduce"?'),
        ("dtypes=", "The parameter \"dtypes\" has '', not one of fp32, fp16, bf16, int32."),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(capsys: Captured, change: str, words: str) -> None:
    assert run(["run", "bad", "2", "--task", "allreduce", "--set", change, "--yes"]) == 2
    assert words in capsys.readouterr().err
    assert run(["status"]) == 0
    assert "bad-2" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_charts_have_the_measured_and_the_published_curves(tmp_path: Path) -> None:
    argv = ["run", "links", "2", "--task", "allreduce", "--preset", "tiny", "--set", "sizes=1KiB:64KiB:x4", "--yes"]
    assert run([*argv, "--set", "dtypes=fp32"]) == 0
    assert run(["charts", "figures", "links-2", "--published"]) == 0
    written = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"collectives.png", "collectives.svg", "collectives.csv"} <= written
    table = (tmp_path / "figures" / "collectives.csv").read_text()
    rows = [line for line in table.splitlines() if line.startswith('"Latency of all_reduce, fp32"')]
    assert sum(",published" in line for line in rows) == 14
    assert sum(",published" not in line and ",fit" not in line for line in rows) == 4
