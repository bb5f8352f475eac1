"""A series has one color in all figures of a report, and legends name the colors that are drawn."""

import re
from collections import defaultdict
from pathlib import Path

from mlbench_cli.app import run

ARCHIVES = Path(__file__).parents[3] / "results" / "archives"


def test_a_run_has_the_color_of_its_method_in_every_figure(tmp_path: Path) -> None:
    methods = ("bsp", "powersgd", "eftopk")
    paths = [str(path) for method in methods for path in sorted(ARCHIVES.glob(f"digits-{method}-2-r?.zip"))]
    assert run(["report", str(tmp_path / "out.html"), *paths]) == 0
    page = (tmp_path / "out.html").read_text("utf-8")
    colors = defaultdict(set)
    for item in re.findall(r"<li><svg(.*?)</li>", page):
        css, label = re.findall(r"\bc-\w+", item)[0], re.sub(r"<[^>]*>", "", item.rpartition("<span>")[2])
        for method in methods:
            if re.search(rf"\b{method}\b", label) or (method == "bsp" and "own method" in label):
                colors[method].add(css)
    assert {method: len(found) for method, found in colors.items()} == dict.fromkeys(methods, 1)
    assert len({next(iter(found)) for found in colors.values()}) == len(methods)


def test_a_legend_names_exactly_the_colors_of_its_figure(tmp_path: Path) -> None:
    paths = [str(path) for method in ("ddp", "powersgd") for path in sorted(ARCHIVES.glob(f"digits-{method}-2-r?.zip"))]
    assert run(["report", str(tmp_path / "out.html"), *paths]) == 0
    page = (tmp_path / "out.html").read_text("utf-8")
    found = 0
    for part in page.split('<ul class="legend">')[1:]:
        legend, _, rest = part.partition("</ul>")
        if rest.startswith('<svg class="plot"'):
            plot = re.split(r"<figcaption|<div class=.panel|<table", rest)[0]
            named, drawn = (set(re.findall(r"\bc-(?!reference)\w+", text)) for text in (legend, plot))
            assert drawn == named
            found += 1
    assert found
