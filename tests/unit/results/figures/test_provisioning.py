"""The figure of provisioning time, from records of clusters alone."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.figures.model import Axis
from mlbench_cli.results.figures.provisioning import draw, provisioning_figures, to_csv
from mlbench_cli.results.figures.svg import render_svg


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


def test_each_resource_has_a_bar_from_its_request_to_its_end() -> None:
    making, removal, other = provisioning_figures([RECORD, UNFINISHED])
    machines = "2 × g2-standard-8 with 1 × nvidia-l4 each"
    assert [figure.title for figure in (making, removal, other)] == [
        f"How rel-2 was made: not ready, gke, europe-west1-b, {machines}",
        "How rel-2 was removed: gone after 180\u00a0s",
        "How half-1 was made: ready after 3.00\u00a0s, eks",
    ]
    assert (making.x.label, making.x.categories) == ("resource", ("GKE cluster", "node pool  workers", "workers  2"))
    assert making.y == Axis("seconds since it began", from_zero=True, unit="s")
    spans = {line.label: list(zip(line.low, line.high, line.notes, strict=True)) for line in making.lines}
    assert spans["waiting for the cloud"] == [
        *((298.25, 300.0, ""), (418.75, 420.5, ""), (420.5, 422.25, "not yet")),
    ]
    assert spans["requests and polling"] == [(0.0, 298.25, ""), (300.0, 418.75, ""), (420.5, 420.5, "not yet")]
    assert making.notes == ("Unfinished: workers  2.",)
    (there,) = other.lines
    assert (there.label, there.low, there.high, there.notes) == ("was there before", (0.0,), (3.0,), ("was there",))


def test_a_page_shows_a_bar_where_its_time_was() -> None:
    picture = render_svg(next(provisioning_figures([RECORD])))
    assert picture.count("<rect") == 2 * 3 + 2  # two parts of three resources, and two samples in the legend
    assert 'x="71.05%" width="28.12%"' in picture  # 300 to 418.75 s of 422.25


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in draw([RECORD], tmp_path / "a")]
    assert [path.read_bytes() for path in draw([RECORD], tmp_path / "b")] == first


def test_a_cluster_without_times_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='Of the cluster "mine" no times are known'):
        draw([Cluster("mine", "attached")], tmp_path / "a")
    assert to_csv([Cluster("mine", "attached")]).count("\n") == 1
