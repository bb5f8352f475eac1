"""Two methods of communication compared, one of which sends its messages while gradients are computed."""

import csv
import json
import zipfile
from pathlib import Path

import pytest

from mlbench_cli.app import run
from tests.contract.clients import answer

Captured = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("forked_ranks")
def test_communication_inside_the_backward_pass_is_no_phase_and_no_ratio_anywhere(home: Path, capsys: Captured) -> None:
    """Nobody can tell how long the messages of ddp take; a reader must not conclude that they take no time."""
    words = ["--task", "digits_resnet", "--preset", "tiny", "--set", "goal_full=30", "--share-machine", "--yes"]
    assert run(["run", "x", "2", *words, "--matrix", "method=ddp,topk"]) == 0

    results = {name: answer(capsys, "status", f"x-{name}-2")["folder"] for name in ("ddp", "topk")}
    for folder in results.values():  # each run recorded the code of its own method
        assert json.loads(Path(folder, "findings.json").read_bytes())["findings"] == []
    timings = {name: json.loads(Path(f, "result.json").read_bytes())["timings"] for name, f in results.items()}
    assert not {"backward", "communication"} & timings["ddp"].keys()
    assert timings["ddp"]["backward_and_communication"]["rank0"] > 0
    assert {"backward", "communication"} <= timings["topk"].keys()

    rows = answer(capsys, "compare", "x-ddp-2", "x-topk-2", "--across", "method", "--across", "conditions")["rows"]
    for name in ("backward", "communication", "backward_and_communication"):
        assert (None in (rows[name]["a"], rows[name]["b"]), rows[name]["ratio"]) == (True, None)

    for form in ("md", "html"):
        assert run(["report", f"report.{form}", "x"]) == 0
    assert run(["charts", "figures", "x"]) == 0
    with open("figures/time_for_all_phases.csv", newline="") as file:
        bars = {(row["series"], row["configuration"].split()[-1]): row for row in csv.DictReader(file)}
    assert float(bars["computing with messages in it", "ddp"]["seconds"]) > 0
    assert ("waiting for messages", "ddp") not in bars
    assert "waits" not in bars["computing with messages in it", "ddp"]["note"]
    assert "waits" in bars["waiting for messages", "topk"]["note"]
    assert "messages in it" in Path("report.html").read_text()

    assert run(["download", "x-ddp-2", "--to", "ddp.zip"]) == 0
    with zipfile.ZipFile("ddp.zip") as archive:
        line = archive.read("official_result.txt").decode()
    assert "Compute and Communication: " in line
    assert ", Communication: " not in line
