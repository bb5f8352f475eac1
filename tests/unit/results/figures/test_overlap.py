"""The picture of what communication a training hides."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.charts import draw
from mlbench_cli.results.figures.overlap import Overlap, draw_sheet, measure_common, merge_spans, read_overlap
from tests.unit.results.runs import sealed_run

TIMELINE = {
    "updates": [6, 7],
    "training": [["forward", 0.0, 0.010], ["backward", 0.010, 0.030], ["communication", 0.030, 0.036]],
    "communication": [[0, 4000, 0.015, 0.016, 0.024], [1, 8000, 0.018, 0.024, 0.036]],
}


def test_hidden_and_exposed_add_up_to_what_was_under_way() -> None:
    overlap = Overlap(
        "a",
        (("backward", 0.0, 10.0), ("communication", 10.0, 14.0), ("communication", 16.0, 17.0)),
        ((1.0, 2.0, 6.0), (1.0, 4.0, 13.0), (0.0, 20.0, 21.0)),
    )
    assert (overlap.exposed, overlap.hidden) == (3.0, 9.0)
    assert overlap.queue == [(0.0, 20.0)]


def test_a_message_that_waits_is_drawn_beside_those_that_travel() -> None:
    """Beneath them it was hidden: somebody travels while others wait."""
    overlap = Overlap("a", (("backward", 0.0, 0.010),), ((0.0, 0.0, 0.004), (0.001, 0.004, 0.008)))
    (figure,) = draw_sheet([overlap]).figures
    assert "queue 3.00\u00a0ms" in figure.title
    lanes = {line.label: line.xs for line in figure.lines}
    assert (lanes["message in flight"], lanes["message behind others"]) == ((1.0, 1.0), (2.0,))
    assert overlap.queue == [(0.001, 0.004)]


def test_spans_are_merged_and_cut() -> None:
    assert merge_spans([(3, 4), (0, 1), (1, 2), (3.5, 3.6)]) == [(0, 2), (3, 4)]
    assert measure_common([(0, 2), (3, 4)], [(1, 3.5), (5, 6)]) == 1.5


def test_runs_with_a_timeline_get_a_picture(tmp_path: Path) -> None:
    with_lanes = sealed_run(tmp_path / "1", name="a-2", workers=2, details={"timeline": TIMELINE})
    without = sealed_run(tmp_path / "2", name="b-2", workers=2)
    written = [path.name for path in draw([with_lanes, without], tmp_path / "charts")]
    assert {"overlap.png", "overlap.svg"} <= set(written)
    text = (tmp_path / "charts" / "overlap.svg").read_text("utf-8")
    assert text == (draw([with_lanes], tmp_path / "again")[0].with_name("overlap.svg")).read_text("utf-8")
    assert "overlap.png" not in [path.name for path in draw([without], tmp_path / "other")]


@pytest.mark.parametrize(
    "timeline",
    [
        None,
        [],
        {"training": []},
        {"training": [["a", 0, 1]], "communication": []},
        {"training": [["a", 0, "x"]], "communication": [[0, 1, 0, 0, 1]]},
        {"training": [["a", 0, 1]], "communication": [[0, 1, 0, 0]]},
        {"training": [["a", 0, 1e300]], "communication": [[0, 1, 0, 0, 1]]},
        {"training": [["a", -1, 1]], "communication": [[0, 1, 0, 0, 1]]},
    ],
    ids=json.dumps,
)
def test_a_timeline_that_cannot_be_read_is_none(tmp_path: Path, timeline: Any) -> None:
    assert read_overlap(Archive.open(sealed_run(tmp_path / "run", details={"timeline": timeline}))) is None


# --- by hand --------------------------------------------------------------------------------------------------------
