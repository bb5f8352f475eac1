"""One door to archives: what `verify` answers with 9 is refused with 9 by every command that presents archives, unless
--unproven is given, which marks every headline."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import api
from mlbench_cli.app import run
from mlbench_cli.errors import CannotTellError
from mlbench_cli.results.archive.files import UNPROVEN
from mlbench_cli.results.archive.judge import JUDGE_VERSION
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal, write_sums
from mlbench_cli.storage import run_folder
from tests import NIGHTLY
from tests.unit.results.runs import (
    event,
    new_run,
    observation_of,
    result_event,
    sealed_run,
    spec,
    timings,
    training_log,
)

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(home: Path) -> Path:
    return home.parent


@pytest.fixture
def forged(folder: Path) -> str:
    """Honest evidence below a result that claims to be of a later judge: a hundred times as fast."""
    archive = sealed_run(folder / "forged", name="demo-2")
    path = archive / run_folder.RESULT
    result = json.loads(path.read_text())
    result["judge"] = JUDGE_VERSION + 1
    result["task_seconds"]["wall"] /= 100
    result["conditions"].update(labels=[], crowded=None, contended=None, quota_limited=None, shared=None)
    path.write_text(json.dumps(result))
    (archive / run_folder.SUMS).unlink()
    write_sums(archive)
    assert run(["verify", str(archive)]) == 9
    return str(archive)


def test_an_archive_of_another_form_is_not_derived_and_never_shown(folder: Path, capsys: Captured) -> None:
    """As archives of earlier or later editions: they are not damaged, but nothing of them can be relied on."""
    archive = sealed_run(folder / "other", name="demo-2")
    result = json.loads((archive / run_folder.RESULT).read_text())
    result["judge"] = JUDGE_VERSION + 2
    result["conditions"] = {"labels": []}
    (archive / run_folder.RESULT).write_text(json.dumps(result))
    write_sums(archive)
    assert run(["verify", str(archive)]) == 9
    assert "only checksums were checked" in capsys.readouterr().out
    for words in (["report", "out.md", str(archive)], ["report", "out.md", str(archive), "--unproven"]):
        assert run(words) == 9
        assert "of another form" in capsys.readouterr().err
    (archive / run_folder.OFFICIAL).write_text("edited")
    assert run(["verify", str(archive)]) == 2


COMMANDS = {
    "compare": ["compare", "ARCHIVE", "ARCHIVE"],
    "report": ["report", "out.md", "ARCHIVE"],
    "page": ["report", "out.html", "ARCHIVE"],
    "charts": ["charts", "figures", "ARCHIVE"],
    "csv": ["export", "csv", "out.csv", "ARCHIVE"],
    "gate": ["gate", "ARCHIVE", "--baseline", "ARCHIVE"],
    "predict": ["predict", "ARCHIVE"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_presents_what_is_not_proven(name: str, forged: str, capsys: Captured) -> None:
    words = [forged if word == "ARCHIVE" else word for word in COMMANDS[name]]
    assert run(words) == 9
    err = capsys.readouterr().err
    assert "not everything follows from the evidence" in err
    assert "--unproven" in err


def test_it_is_never_signed(forged: str, capsys: Captured) -> None:
    Path("key").touch()
    assert run(["verify", forged, "--sign", "key"]) == 9
    assert run(["verify", forged, "--sign", "key", "--unproven"]) == 2
    assert "has no option" in capsys.readouterr().err


@pytest.mark.slow
def test_unproven_marks_every_headline(forged: str, folder: Path, capsys: Captured) -> None:
    honest = str(sealed_run(folder / "honest", name="demo-2", seconds=101.0))
    capsys.readouterr()
    assert run(["compare", forged, honest, "--unproven"]) == 0
    out, err = capsys.readouterr()
    assert f"demo-2 {UNPROVEN}" in out.splitlines()[0]
    assert "is unproven. The documents were judged by version" in err
    assert "tasks differ" in out  # it is never one group with what is proven
    assert run(["report", "out.md", forged, "--unproven"]) == 0
    assert all(
        UNPROVEN in line.replace("\\", "") for line in Path("out.md").read_text().splitlines() if "demo-2" in line
    )
    assert run(["charts", "figures", forged, "--unproven"]) == 0
    for row in Path("figures/summary.csv").read_text().splitlines()[1:]:
        assert UNPROVEN in row
    for figure in ("total_time", "time_for_all_phases"):
        texts = re.findall(r"<!-- (.*?) -->", Path(f"figures/{figure}.svg").read_text(), re.DOTALL)
        assert any(UNPROVEN in text for text in texts)
    assert run(["gate", forged, "--baseline", honest, "--unproven"]) == 9


def test_the_python_api_refuses_and_marks_alike(forged: str) -> None:
    with pytest.raises(CannotTellError, match="not everything follows"):
        api.open_archive(forged)
    with api.open_archive(forged, unproven=True) as archive:
        assert archive.run["name"] == f"demo-2 {UNPROVEN}"
        assert archive.result["task"].endswith(UNPROVEN)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1e200, 1e308, 1.7e308] if NIGHTLY else [1.7e308])
def test_the_largest_numbers_are_presented_without_a_crash(folder: Path, capsys: Captured, seconds: float) -> None:
    names = []
    for number, most in enumerate((seconds, 1e308)):
        changes: dict[str, Any] = {
            "wall_seconds": most,
            "training_seconds": most,
            "timings": timings(most),
            "samples": 10**300,
        }
        logs = {rank: training_log(rank)[: -1 if rank == 0 else None] for rank in (0, 1)}
        logs[0] += [
            event("metric", at=50, name="val_Prec@1", value=most, epoch=most, seconds=most),
            result_event(**changes),
        ]
        recorded = new_run(folder / f"huge-{number}", spec("huge-2"), logs)
        write_run_document(recorded)
        seal(recorded, observation_of())
        names.append(str(recorded.folder))
    for words in (
        ["report", "out.html", *names], ["report", "out.md", *names], ["charts", "figures", *names],
        ["compare", *names], ["export", "csv", "logs/all.csv", *names], ["gate", names[0], "--baseline", names[1]],
    ):  # fmt: skip
        assert run([*words, "--unproven"]) == (9 if words[0] == "gate" else 0), words
        assert "Internal error" not in capsys.readouterr().err
