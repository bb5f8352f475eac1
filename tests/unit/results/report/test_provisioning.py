"""How clusters were made, in a report."""

from pathlib import Path

from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.report.collect import collect
from mlbench_cli.results.report.html import render_html
from mlbench_cli.results.report.provisioning import provisioning_figures
from mlbench_cli.results.report.svg import render_svg
from tests.unit.results.figures.test_provisioning import RECORD, UNFINISHED
from tests.unit.results.runs import sealed_run


def test_each_resource_has_a_bar_from_its_request_to_its_end(tmp_path: Path) -> None:
    making, removal, other = provisioning_figures([RECORD, UNFINISHED])
    assert [figure.title for figure in (making, removal, other)] == [
        *("How rel-2 was made", "How rel-2 was removed", "How half-1 was made"),
    ]
    assert making.x.categories == ("GKE cluster", "node pool  workers", "workers  2")
    lines = {line.label: line.ys for line in making.lines}
    assert lines["before its turn"] == (0.0, 300.0, 420.5)
    assert lines["waiting for the cloud"] == (1.75, 1.75, 1.75)
    assert lines["asking for it, and looking"] == (298.25, 118.75, 0.0)
    assert making.notes == ("Not come to an end: workers  2.",)
    assert {line.label: line.ys for line in other.lines}["was there before"] == (3.0,)


def test_the_part_before_a_bar_is_not_drawn(tmp_path: Path) -> None:
    making = next(provisioning_figures([RECORD]))
    picture = render_svg(making)
    assert "before its turn" not in picture.split("aria-label", 1)[1].split(">", 1)[1]
    assert picture.count("<rect") == 2 * 3 + 2  # two parts of three resources, and two samples in the legend
    with Archive.open(sealed_run(tmp_path / "run")) as archive:
        page = render_html(collect([archive], more=[making]))
    assert "How rel-2 was made" in page
    assert '"blank":true' in page
