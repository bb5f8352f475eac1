"""The figure of provisioning time, from records of clusters alone."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model import Cluster
from mlbench_cli.results.figures.provisioning import draw, to_csv


def times_record(kind: str, name: str, began: float, ready: float | None, **more: Any) -> dict[str, object]:
    waits = [{"reason": "it is CREATING", "seconds": 1.5}, {"reason": "it is UPDATING", "seconds": 0.25}]
    line = {"kind": kind, "name": name, "adopted": False, "began": began, "accepted": began, "ready": ready}
    return {**line, "waits": waits, **more}


RECORD = Cluster(
    "rel-2",
    "gke",
    details={
        "location": "europe-west1-b",
        "nodes": 2,
        "machine_type": "g2-standard-8",
        "gpu": "nvidia-l4",
        "gpus_per_node": 1,
        "provisioning": [
            times_record("GKE cluster", "rel-2", 0.0, 300.0),
            times_record("node pool", "rel-2/workers", 300.0, 420.5),
            times_record("workers", "rel-2/2", 420.5, None),
        ],
        "removal": [{"kind": "GKE cluster", "name": "rel-2", "began": 0.0, "gone": 180.0, "waits": []}],
    },
)
UNFINISHED = Cluster(
    "half-1", "eks", "failed", details={"provisioning": [times_record("stack", "s", 0.0, 3.0, adopted=True, waits=[])]}
)


def test_the_numbers_are_beside_the_figure(tmp_path: Path) -> None:
    written = draw([RECORD, UNFINISHED], tmp_path / "charts")
    assert [path.name for path in written] == ["provisioning.png", "provisioning.svg", "provisioning.csv"]
    assert all(path.stat().st_size > 0 for path in written)
    rows = list(csv.DictReader(io.StringIO(written[2].read_text())))
    assert [row["resource"] for row in rows] == ["rel-2", "rel-2/workers", "rel-2/2", "rel-2", "s"]
    assert [row["ended"] for row in rows] == ["300.0", "420.5", "", "180.0", "3.0"]
    assert rows[0]["waited"] == "1.75"
    assert {row["phase"] for row in rows if row["cluster"] == "half-1"} == {"making"}


def test_the_figure_names_what_it_shows(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        from mlbench_cli.results.figures.provisioning import _figure

        file = io.StringIO()
        _figure([RECORD, UNFINISHED]).savefig(file, format="svg")
    text = file.getvalue()
    for words in ("rel-2: not ready", "half-1: ready after 3.0 s", "Removal: 3 min 00 s", "node pool  workers"):
        assert words in text
    for words in ("was there", "not yet", "2 min 00 s", "minutes since its making began"):
        assert words in text


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in draw([RECORD], tmp_path / "a")]
    assert [path.read_bytes() for path in draw([RECORD], tmp_path / "b")] == first


def test_a_cluster_without_times_is_told() -> None:
    with pytest.raises(UsageError, match='Of the cluster "mine" no times are known'):
        draw([Cluster("mine", "attached")], Path("/nowhere"))
    assert to_csv([Cluster("mine", "attached")]).count("\n") == 1
