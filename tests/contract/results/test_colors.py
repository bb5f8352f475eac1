"""The key of a chart names the colors that are drawn."""

import re
from pathlib import Path

from mlbench_cli.app import run

ARCHIVES = Path(__file__).parents[3] / "results" / "archives"


def test_a_legend_names_exactly_the_colors_of_its_figure(tmp_path: Path) -> None:
    paths = [str(path) for method in ("ddp", "powersgd") for path in sorted(ARCHIVES.glob(f"digits-{method}-2-r?.zip"))]
    assert run(["report", str(tmp_path / "out.html"), *paths]) == 0
    page = (tmp_path / "out.html").read_text("utf-8")
    found = 0
    for part in page.split('<ul class="legend">')[1:]:
        legend, _, rest = part.partition("</ul>")
        if rest.startswith('<svg class="plot"'):
            plot = re.split(r"<figcaption|<div class=.panel|<table", rest)[0]
            named, drawn = (set(re.findall(r"\bc-(?!edge)\w+", text)) for text in (legend, plot))
            assert drawn == named
            found += 1
    assert found
