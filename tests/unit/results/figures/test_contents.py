"""What figures hold before they are drawn: lines, axes, looks, ticks and small multiples, by hand."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.analysis.collectives import FACTS, Curve
from mlbench_cli.results.analysis.experiment_table import Sample, make_rows
from mlbench_cli.results.analysis.rates import PublishedSeries, Rate
from mlbench_cli.results.figures import experiment, plans, predictions
from mlbench_cli.results.figures.collectives import collective_figures, collective_sheets
from mlbench_cli.results.figures.experiment import draw_experiment, draw_front
from mlbench_cli.results.figures.look import (
    choose_looks,
    choose_shared_looks,
    color_of_phase,
    family_of,
    look_of,
    read_colors,
)
from mlbench_cli.results.figures.model import (
    MAX_SERIES,
    Axis,
    Figure,
    Kind,
    Line,
    Scale,
    Sheet,
    Spread,
    choose_divider,
    split_panels,
    thin,
)
from mlbench_cli.results.figures.plans import draw_plan
from mlbench_cli.results.figures.predictions import PredictedPair, draw_predictions
from mlbench_cli.results.figures.provisioning import list_times, provisioning_figures, to_csv
from mlbench_cli.results.figures.ticks import choose_ticks, format_tick, place_axis, values_of, widen


@pytest.fixture
def sheets(monkeypatch: pytest.MonkeyPatch) -> list[Sheet]:
    """The sheets that were to be written."""
    found: list[Sheet] = []

    def keep(given: Sequence[Sheet], folder: Path, more: Mapping[str, str] | None = None) -> list[Path]:
        found.extend(given)
        return []

    for module in (experiment, plans, predictions):
        monkeypatch.setattr(module, "write_sheets", keep)
    return found


def figure(*lines: Line, x: Axis | None = None, kind: Kind = Kind.LINES, **more: Any) -> Figure:
    return Figure("k", "title", x or Axis("x"), Axis("y"), lines, kind=kind, **more)


# --- lines and figures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns", [{"low": (1.0,)}, {"high": (1.0,)}, {"few": (True,)}, {"notes": ("a",)}, {"xs": (1.0,)}]
)
def test_columns_of_a_line_have_one_length(columns: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the line 'a' has columns of different lengths"):
        Line(**{"label": "a", "xs": (1.0, 2.0), "ys": (1.0, 2.0), **columns})


def test_points_of_a_line_are_those_with_a_value() -> None:
    line = Line("a", (1.0, 2.0, 3.0), (5.0, None, 7.0), (4.0, 4.0, 6.0), (6.0, 6.0, 8.0), few=(True, False, False))
    assert list(line.points()) == [(1.0, 5.0, 4.0, 6.0, True, ""), (3.0, 7.0, 6.0, 8.0, False, "")]
    assert list(Line("a", (1.0,), (5.0,), low=(4.0,), notes=("n",)).points()) == [(1.0, 5.0, None, None, False, "n")]


def test_spans_are_bars_from_their_begin_to_their_end() -> None:
    line = Line.of_spans("a", "data", [(0, 1.0, 3.5), (2, 4.0, 4.0)], ("x", "y"))
    assert line == Line("a", (0.0, 2.0), (2.5, 0.0), (1.0, 4.0), (3.5, 4.0), notes=("x", "y"), color="data")
    assert Line.of_spans("a", "data", []).xs == ()


def test_rows_of_a_figure_name_categories_and_numbers() -> None:
    lines = (Line("a", (0.0, 1.0), (5.0, None), (4.0, None), (6.0, None)), Line("b", (1.0,), (7.0,)))
    named = figure(*lines, x=Axis("x", Scale.CATEGORIES, categories=("one", "two")))
    assert list(named.rows()) == [
        ("a", "one", 5.0, 4.0, 6.0),
        ("a", "two", None, None, None),
        ("b", "two", 7.0, None, None),
    ]
    assert [row[1] for row in figure(Line("a", (0.5, 1e9), (1.0, 1.0))).rows()] == ["0.5", "1e+09"]


def test_a_figure_describes_itself_for_people_who_cannot_see_it() -> None:
    lines = [Line(f"s{number}", (1.0,), (1.0,)) for number in range(9)]
    assert figure(*lines[:2]).alt == "title: y over x, for s0, s1."
    assert figure(*lines, panel="p").alt == "title, p: y over x, for s0, s1, s2, s3, s4, s5, s6, s7 and 1 more."


def test_lines_of_a_group_are_one_part_of_a_bar() -> None:
    grouped = figure(
        Line("a", (0.0, 1.0), (1.0, 2.0), group="g", color="data", notes=("n", "m")),
        Line("b", (0.0, 1.0), (10.0, None), group="g"),
        Line("c", (0.0,), (5.0,)),
        kind=Kind.BARS,
    )
    first, second = grouped.parts
    assert (first.label, first.xs, first.ys, first.color, first.notes) == (
        "g",
        (0.0, 1.0),
        (11.0, 2.0),
        "data",
        ("n", "m"),
    )
    assert second is grouped.lines[2]


@pytest.mark.parametrize(
    ("lines", "kind", "categories", "needed"),
    [
        (("a",), Kind.LINES, (), False),
        (("a", "b"), Kind.LINES, (), True),
        (("a",), Kind.SPANS, (), True),
        (("a", "b"), Kind.BARS, ("a", "b"), False),
        (("a", "b"), Kind.BARS, ("x", "b"), True),
        (("a", "b"), Kind.RANGES, ("a", "b"), True),
    ],
)
def test_a_legend_is_for_series_without_other_names(
    lines: tuple[str, ...], kind: Kind, categories: tuple[str, ...], needed: bool
) -> None:
    found = figure(
        *(Line(label, (0.0,), (1.0,)) for label in lines),
        kind=kind,
        x=Axis("x", Scale.CATEGORIES, categories=categories),
    )
    assert found.needs_legend is needed


def test_panels_are_those_of_the_lines_and_keep_colors_and_short_names() -> None:
    lines = [
        Line(
            f"p{number % 2}, s{number // 2}",
            (1.0,),
            (1.0,),
            panel=f"p{number % 2}",
            short=f"s{number // 2}",
            color="data",
        )
        for number in range(8)
    ]
    goal = Line("goal", (1.0,), (1.0,), reference=True)
    panels, legend = split_panels(figure(*lines, goal))
    assert [(each.panel, [line.label for line in each.lines]) for each in panels] == [
        ("p0", ["s0", "s1", "s2", "s3", "goal"]),
        ("p1", ["s0", "s1", "s2", "s3", "goal"]),
    ]
    assert [line.label for line in legend] == ["s0", "s1", "s2", "s3", "goal"]
    assert split_panels(figure(*lines, kind=Kind.BARS)).figures == (figure(*lines, kind=Kind.BARS),)
    assert split_panels(figure(*lines[:MAX_SERIES])).figures == (figure(*lines[:MAX_SERIES]),)


@pytest.mark.parametrize(
    ("settings", "divider"),
    [
        ([{"n": "a", "m": str(k)} for k in range(8)], ""),  # neither leaves two series for a panel
        ([{"n": n, "m": m} for n in "ab" for m in "1234"], "n"),
        ([{"method": n, "m": m} for n in "ab" for m in "1234"], "m"),
        ([{"method": n, "m": "1"} for n in "aabb"], "method"),
        ([{"n": "a"}] * 4, ""),
    ],
)
def test_panels_are_divided_by_the_setting_that_needs_the_fewest(settings: list[dict[str, str]], divider: str) -> None:
    assert choose_divider(list(settings[0]), settings) == divider


def test_thinning_keeps_the_ends_and_the_extremes_of_each_group() -> None:
    xs = [float(number) for number in range(10)]
    ys: list[float | None] = [5.0, 9.0, 0.0, 5.0, 5.0, None, None, 5.0, 7.0, 5.0]
    assert thin(xs, ys, 10) == (xs, ys)
    assert thin(xs, ys, 4) == ([0.0, 1.0, 2.0, 7.0, 8.0, 9.0], [5.0, 9.0, 0.0, 5.0, 7.0, 5.0])
    kept, _ = thin([float(n) for n in range(10_000)], [math.sin(n / 100) for n in range(10_000)], 600)
    assert 300 <= len(kept) <= 602


# --- axes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "options", "ends"),
    [
        ([0.0, 10.0], {}, (-0.6, 10.8)),
        ([2.0, 10.0], {"from_zero": True}, (0.0, 10.8)),
        ([-2.0, 8.0], {"from_zero": True}, (-2.6, 8.8)),
        ([5.0], {}, (4.7, 5.4)),
        ([0.0], {}, (-0.06, 0.08)),
        ([-5.0], {}, (-5.3, -4.6)),
        ([1.0, 100.0], {"logarithmic": True}, (1 / 100**0.05, 100 * 100**0.05)),
        ([2.0, -1.0], {"logarithmic": True}, (2 / 1.1, 2 * 1.1)),
        ([1e301, 4.0, 6.0], {}, (3.88, 6.16)),
    ],
)
def test_an_axis_has_some_room_around_its_values(
    values: list[float], options: dict[str, bool], ends: tuple[float, float]
) -> None:
    assert list(widen(values, **options)) == pytest.approx(list(ends))


@pytest.mark.parametrize(
    ("low", "high", "logarithmic", "ticks"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (0.0, 1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 2.4, False, [0, 0.5, 1.0, 1.5, 2.0]),
        (90.0, 135.0, False, [90, 100, 110, 120, 130]),
        (-1.0, 1.0, False, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (1.0, 1000.0, True, [1, 10, 100, 1000]),
        (1.0, 30.0, True, [1, 3, 10, 30]),
        (1.0, 9.0, True, [1, 2, 5]),
        (2.0, 5.0, True, [2, 3, 5]),
        (1.0, 1e14, True, [1, 1e3, 1e6, 1e9, 1e12]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, logarithmic: bool, ticks: list[float]) -> None:
    assert choose_ticks(low, high, logarithmic=logarithmic) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.1, "s", "0.1"),
        (0.09, "s", "90 ms"),
        (1e-3, "s", "1 ms"),
        (9e-4, "s", "900 µs"),
        (0.0, "s", "0"),
        (999.0, "B/s", "999 B/s"),
        (1e3, "B/s", "1 kB/s"),
        (2.5e12, "B/s", "2.5 TB/s"),
        (1023.0, "B", "1023 B"),
        (1024.0, "B", "1 KiB"),
        (2.0**20, "B", "1 MiB"),
        (3 * 2.0**30, "B", "3 GiB"),
        (1e18, "", "1e+18"),
        (9.9994e15, "", "9,999T"),
        (1e4, "", "10k"),
        (9999.0, "", "9,999"),
        (-25000.0, "", "-25k"),
        (1e-4, "", "0.0001"),
        (0.00005, "", "0.00005"),
        (0.000012, "", "0.000012"),
    ],
)
def test_a_tick_is_short(value: float, unit: str, text: str) -> None:
    assert format_tick(value, unit).replace("\u00a0", " ") == text


def test_places_on_an_axis() -> None:
    linear = place_axis(Axis("x", from_zero=True), [1.0, 10.0])
    assert [linear.low, linear.share(0.0), linear.share(5.4)] == pytest.approx([0.0, 0.0, 0.5])
    logarithmic = place_axis(Axis("x", Scale.LOG10), [1.0, 100.0])
    assert logarithmic.share(10.0) == pytest.approx(0.5)
    assert [logarithmic.share(value) for value in (0.0, -1.0, math.nan)] == [-math.inf] * 3
    assert linear.share(math.inf) == -math.inf
    categories = place_axis(Axis("x", Scale.CATEGORIES, categories=("a", "b", "c")), [])
    assert (categories.low, categories.high, categories.ticks) == (-0.6, 2.6, [0.0, 1.0, 2.0])
    assert place_axis(Axis("x", ticks=(1.0, 4.0)), [2.0]).ticks == [1.0, 4.0]
    assert len(place_axis(Axis("x", ticks=(1.0,)), [2.0]).ticks) > 1


def test_an_axis_holds_stacked_bars_and_the_ends_of_intervals() -> None:
    lines = (Line("a", (0.0, 1.0), (1.0, None), (0.5, None), (9.0, None)), Line("b", (0.0,), (2.0,)))
    assert values_of(figure(*lines)) == ([0.0, 1.0, 0.0], [1.0, 0.5, 9.0, 2.0])
    assert values_of(figure(*lines, kind=Kind.BARS)) == ([0.0, 1.0, 0.0], [0.0, 3.0, 0.0, 9.0])


# --- looks ----------------------------------------------------------------------------------------------------------


def test_methods_have_the_color_of_their_family_and_a_mark_each() -> None:
    assert choose_looks(["bsp", "wfbp", "mgwfbp"]) == [("step", 0), ("overlap", 0), ("overlap", 1)]
    assert choose_looks(["task's own", "dgc (codec=x)"]) == [("step", 0), ("sparse", 2)]
    assert choose_looks(["bsp", "bsp"]) == [look_of(0), look_of(1)]
    assert choose_looks(["bsp", "unknown"]) == [look_of(0), look_of(1)]
    assert len({look_of(index) for index in range(42)}) == 42


def test_equal_names_share_a_look() -> None:
    assert choose_shared_looks(["a", "b", "a"], ["bsp", "wfbp", "bsp"]) == [("step", 0), ("overlap", 0), ("step", 0)]
    by_index = choose_shared_looks(["a", "b", "a"], ["bsp", "wfbp", "dgc"])
    assert by_index == [look_of(0), look_of(1), look_of(0)]


def test_families_and_phases_in_words_and_colors() -> None:
    assert [family_of(name) for name in ("fsdp2", "topk", "none")] == [
        "engines of torch",
        "only the largest numbers",
        "",
    ]
    phases = ("backward", "communication", "data_wait", "metrics", "other", "compute", "unknown")
    assert [color_of_phase(name) for name in phases] == [
        *("compute", "communication", "data", "evaluation", "other", "compute", "other"),
    ]
    colors = read_colors()
    assert (colors["page"], colors["on-compute"]) == ("#ffffff", "#ffffff")  # the light ones
    assert {"step", "overlap", "compute"} <= set(colors)


# --- collectives ----------------------------------------------------------------------------------------------------


def curve(label: str, fit: Any = None, **changes: Any) -> Curve:
    facts = {**dict.fromkeys(FACTS, ""), "backend": "gloo", "ranks": label, "device": "cpu"}
    fields = {"run": "r", "collective": "all_reduce", "dtype": "fp32", "place": "in_place", "machine": "m"}
    points = ((8, 2.0, 0.004), (1024, 4.0, 0.25))
    return Curve(**{**fields, "points": points, "fit": fit, "facts": facts, "label": label, **changes})


def test_a_curve_is_drawn_as_latency_and_as_bandwidth_with_its_fit() -> None:
    fit = {"alpha_us": 2.0, "algbw": 0.5, "off_mean": 0.07}  # 2 us + 2 us per 1,000 bytes
    latency, bandwidth = collective_figures([curve("a", fit)])
    assert (latency.key, latency.title, bandwidth.title) == (
        *("collective0-latency", "Latency of all_reduce, fp32"),
        "Bandwidth of all_reduce, fp32",
    )
    own, fitted = latency.lines
    assert own.label.replace("\u00a0", " ") == "a: 2.00 µs + S / 500 MB/s (±7 %)"
    assert (own.xs, own.ys) == ((8.0, 1024.0), (2e-6, 4e-6))
    assert list(fitted.ys) == pytest.approx([2.016e-6, 4.048e-6])
    assert (fitted.label, fitted.reference, fitted.is_named, own.color) == ("a: fit", True, False, fitted.color)
    own, fitted = bandwidth.lines
    assert own.ys == (4e6, 2.5e8)
    assert list(fitted.ys) == pytest.approx([4e6 * 2 / 2.016, 2.5e8 * 4 / 4.048])
    assert [(each.y.unit, each.y.label, each.x.unit) for each in (latency, bandwidth)] == [
        *(("s", "time", "B"), ("B/s", "bus bandwidth", "B")),
    ]


def test_a_fit_without_a_bandwidth_is_a_latency_alone() -> None:
    latency, _ = collective_figures([curve("a", {"alpha_us": 2.0, "off_mean": 0.5}, place="out_of_place")])
    assert [line.label.replace("\u00a0", " ") for line in latency.lines] == [
        *("a, out of place: 2.00 µs (±50 %)", "a, out of place: fit"),
    ]
    assert latency.lines[1].ys == (2e-6, 2e-6)
    assert len(next(collective_figures([curve("a")])).lines) == 1


def test_published_curves_have_the_color_of_their_counterparts() -> None:
    published = replace(curve("a"), label="published 2020, a", published=True)
    latency = next(collective_figures([published, curve("b"), curve("a")]))
    looks = {line.label: (line.color, line.shape) for line in latency.lines}
    assert looks["published 2020, a"] == looks["a"] != looks["b"]
    assert [line.reference for line in latency.lines] == [True, False, False]


@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [
        ((1, 2**20), (1.0, 2.0**5, 2.0**10, 2.0**15, 2.0**20)),
        ((8, 64), (8.0, 16.0, 32.0, 64.0)),
        ((64, 2**14), (64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)),
    ],
)
def test_sizes_are_labeled_at_powers_of_two(sizes: tuple[int, int], ticks: tuple[float, ...]) -> None:
    points = tuple((size, 1.0, 1.0) for size in sizes)
    assert next(collective_figures([curve("a", points=points)])).x.ticks == ticks


def test_sheets_of_collectives_by_type_and_kind() -> None:
    curves = [curve("a"), curve("b", collective="reduce", functional=True), curve("c", dtype="fp16", machine="n")]
    found = list(collective_sheets(curves))
    assert [(each.name, each.title, len(each.figures), each.marks) for each in found] == [
        ("collectives_latency_fp32", "Latency of collectives, fp32", 2, ("PARTLY FUNCTIONAL ONLY",)),
        ("collectives_bandwidth_fp32", "Bandwidth of collectives, fp32", 2, ("PARTLY FUNCTIONAL ONLY",)),
        ("collectives_latency_fp16", "Latency of all_reduce, fp16", 1, ()),
        ("collectives_bandwidth_fp16", "Bandwidth of all_reduce, fp16", 1, ()),
    ]
    assert [each.footnote for each in found[::2]] == ["Measured on m.", "Measured on n."]
    many = [curve(str(number), machine=f"m{number}") for number in range(5)]
    assert next(iter(collective_sheets(many))).footnote == "Measured on m0; m1; m2; m3 and others."
    silent = curve("a", points=((8, 2.0, 0.0),))
    assert [each.name for each in collective_sheets([silent])] == ["collectives_latency_fp32"]


# --- experiments, plans and predictions -----------------------------------------------------------------------------


def sample(method: str, workers: int, value: float | None, unit: str = "images/s", **more: Any) -> Sample:
    settings = {"task": "t", "method": method, **more.pop("settings", {})}
    return Sample(more.pop("run", f"{method}-{workers}"), settings, workers, value, unit, **more)


def test_an_experiment_is_drawn_by_workers_with_its_best_speed_up(sheets: list[Sheet]) -> None:
    samples = [
        sample("bsp", 1, 100.0),
        *(sample("bsp", 2, value, run=f"r{value}") for value in (140.0, 160.0)),
        *(sample("bsp", 4, value, run=f"r{value}") for value in (190.0, 200.0, 210.0)),
        sample("wfbp", 2, 90.0),
        sample("wfbp", 4, None, problem="x"),
    ]
    paper = PublishedSeries("paper", "t", 1, "10GbE", "BSP", "images", (Rate(2, 300.0, 4.0),))
    draw_experiment("T", make_rows(samples, [paper]), Path("unused"))
    throughput, pareto = sheets
    assert (throughput.name, throughput.title, pareto.name, pareto.title, pareto.subtitle) == (
        *("throughput", "T", "pareto", "T: time against cost"),
        "The numbers are workers.",
    )
    [found] = throughput.figures
    assert (found.title, found.x.ticks, found.x.scale) == ("t, images/s", (1.0, 2.0, 4.0), Scale.LOG2)
    own, other, published = found.lines
    assert (own.label, own.xs, own.ys) == ("bsp", (1.0, 2.0, 4.0), (100.0, 150.0, 200.0))
    assert own.low[0] is None
    assert own.low[1] == pytest.approx(140.0)  # two runs: their range
    assert own.high[1] == pytest.approx(160.0)
    assert own.high[2] == pytest.approx(200 + 4.30265 * 10 / math.sqrt(3), rel=1e-5)  # t(0.975, 2)
    assert (own.few, own.notes) == ((False, True, False), ("", "", "2.00×"))
    assert (other.xs, other.low, other.notes) == ((2.0,), (), ("",))
    assert (published.label, published.reference, published.panel) == ("10GbE, BSP, paper", True, "published")
    assert (published.low, published.high, published.few) == ((296.0,), (304.0,), (False,))
    assert [(line.color, line.shape) for line in found.lines[:2]] == [("step", 0), ("overlap", 0)]


def test_published_rows_have_looks_that_no_row_of_the_experiment_has(sheets: list[Sheet]) -> None:
    papers = [PublishedSeries("p", "t", 1, "10GbE", f"M{n}", "images", (Rate(2, 300.0, None),)) for n in range(3)]
    draw_experiment("T", make_rows([sample("bsp", 2, 100.0), sample("wfbp", 2, 90.0)], papers), Path("unused"))
    [found] = sheets[0].figures
    looks = [(line.color, line.shape) for line in found.lines]
    assert len(set(looks)) == len(looks) == 5


def test_bytes_that_were_sent_in_vain_are_not_drawn(sheets: list[Sheet]) -> None:
    samples = [
        sample("bsp", 2, 9.0, unit="seconds", sent=1e6),
        sample("bsp", 4, None, unit="seconds", sent=1e6, problem="x"),
        sample("bsp", 8, 8.0, unit="seconds"),
    ]
    draw_experiment("T", make_rows(samples), Path("unused"))
    assert sheets[1].name == "pareto"
    [found] = sheets[1].figures
    assert [(line.xs, line.ys) for line in found.lines] == [((1.0,), (9.0,))]


def test_offers_of_an_experiment_are_points_with_their_workers_and_a_front(sheets: list[Sheet]) -> None:
    """1,000 images at 100 images/s of one worker take 10 s of a worker, at 160 of two 6.25 s of each."""
    draw_experiment("T", make_rows([sample("bsp", 2, 160.0), sample("bsp", 1, 100.0)]), Path("unused"))
    [found] = sheets[1].figures
    assert (found.x.label, found.y.label) == ("seconds of workers for 1,000 units", "seconds for 1,000 units")
    offers, front = found.lines
    assert (offers.label, offers.xs, offers.ys, offers.notes) == ("t, bsp", (10.0, 12.5), (10.0, 6.25), ("1", "2"))
    assert (front.label, front.reference) == ("nothing is faster and cheaper", True)
    assert (front.xs, front.ys) == ((10.0, 12.5, 12.5), (10.0, 10.0, 6.25))


def test_what_was_reached_is_drawn_against_the_bytes_that_were_sent(sheets: list[Sheet]) -> None:
    samples = [
        sample(method, 2, value, unit="Prec@1", sent=sent, settings={"network": "10GbE", "series": "s"})
        for method, value, sent in (("bsp", 90.0, 3e6), ("topk", 89.0, 1e6))
    ]
    draw_experiment("T", make_rows([*samples, sample("noop", 2, 10.0, unit="Prec@1")]), Path("unused"))
    _, pareto = sheets
    assert (pareto.title, pareto.subtitle) == ("T: against bytes sent", "")
    [found] = pareto.figures
    assert (found.title, found.x.label, found.y.scale) == ("t, 10GbE", "MB sent by rank 0", Scale.LINEAR)
    assert [(line.xs, line.ys, line.notes) for line in found.lines] == [
        ((3.0,), (90.0,), ("bsp",)),
        ((1.0,), (89.0,), ("topk",)),
    ]


def test_seconds_against_bytes_are_on_a_logarithmic_axis_and_sizes_are_named(sheets: list[Sheet]) -> None:
    samples = [sample("bsp", workers, 9.0, unit="seconds", sent=1e6) for workers in (1, 2)]
    draw_experiment("T", make_rows(samples), Path("unused"))
    [found] = sheets[1].figures
    assert sheets[1].subtitle == "The numbers are workers."
    assert found.y.scale is Scale.LOG10
    assert [line.notes for line in found.lines] == [("bsp, 1",), ("bsp, 2",)]


def test_an_experiment_without_a_value_has_no_figure(sheets: list[Sheet]) -> None:
    draw_experiment("T", make_rows([sample("bsp", 2, None, problem="x")]), Path("unused"))
    assert sheets == []


def test_a_front_steps_down_at_the_next_offer() -> None:
    line = draw_front([(3.0, 1.0), (1.0, 5.0), (2.0, 5.0), (2.0, 4.0), (4.0, 2.0)])
    assert (line.xs, line.ys) == ((1.0, 2.0, 2.0, 3.0, 3.0), (5.0, 5.0, 4.0, 4.0, 1.0))


def test_a_plan_is_a_cloud_of_points_with_its_front_and_its_best(sheets: list[Sheet]) -> None:
    clouds = {"gke": [(20.0, 2.0), (10.0, 3.0), (0.0, 1.0), (1.0, 0.0)], "eks": [(5.0, 5.0)]}
    draw_plan("t", clouds, [(5.0, 5.0), (10.0, 3.0), (1.0, 0.0)], [(10.0, 3.0)], Path("unused"))
    [sheet] = sheets
    [found] = sheet.figures
    assert (sheet.name, sheet.title, sheet.subtitle) == (
        *("plan", "Time and price to the goal of t, as predicted"),
        "Predictions, not measurements.",
    )
    assert [(line.label, line.xs, line.ys, line.reference, line.is_joined) for line in found.lines] == [
        ("gke", (10.0, 20.0), (3.0, 2.0), False, False),
        ("eks", (5.0,), (5.0,), False, False),
        ("nothing is faster and cheaper", (5.0, 10.0), (5.0, 3.0), True, True),
        ("the best", (10.0,), (3.0,), False, False),
    ]
    assert (found.x.scale, found.x.unit, found.y.label) == (Scale.LOG10, "s", "price in USD")


def test_a_plan_without_prices_has_neither_front_nor_best(sheets: list[Sheet]) -> None:
    draw_plan("t", {"here": [(1.0, 0.0)]}, [(1.0, 0.0)], [(1.0, 0.0)], Path("unused"))
    assert [(line.label, line.xs) for line in sheets[0].figures[0].lines] == [("here", ())]


def test_predictions_are_drawn_over_measurements_with_a_band_of_15_percent(sheets: list[Sheet]) -> None:
    pairs = [
        PredictedPair("g", "bsp", 10.0, 13.0),
        PredictedPair("g", "wfbp", 20.0, 26.0),
        PredictedPair("g", "bsp", 30.0, 30.0),
        PredictedPair("h", "wfbp", 1.0, 2.0),
    ]
    draw_predictions(pairs, "ms", Path("unused"))
    [sheet] = sheets
    assert (sheet.name, sheet.subtitle) == ("predictions", "The band is 15% around the measured value.")
    first, second = sheet.figures
    band, equal, bsp, wfbp = first.lines
    ends = (10.0 / 1.3, 30.0 * 1.3)
    assert (band.label, band.xs, band.spread, band.is_joined) == ("within 15%", ends, Spread.BAND, False)
    assert list(band.low) == pytest.approx([0.85 * end for end in ends])
    assert list(band.high) == pytest.approx([1.15 * end for end in ends])
    assert (equal.xs, equal.ys, equal.reference, equal.is_joined) == (ends, ends, True, True)
    assert (bsp.label, bsp.xs, bsp.ys, bsp.is_joined) == ("bsp", (10.0, 30.0), (13.0, 30.0), False)
    assert (wfbp.color, wfbp.panel) == ("overlap", "during the backward pass")
    assert [line.label for line in second.lines] == ["within 15%", "equal", "wfbp"]
    assert (first.x.label, first.y.label, first.x.scale) == ("measured ms", "predicted ms", Scale.LOG10)
    with pytest.raises(UsageError, match="no run has measured its steps"):
        draw_predictions([], "ms", Path("unused"))


# --- provisioning ---------------------------------------------------------------------------------------------------


def entry(name: str = "c/workers", **changes: Any) -> dict[str, Any]:
    fields = {"kind": "pool", "name": name, "adopted": False, "began": 1.0, "accepted": 2.0, "ready": 9.0}
    return {**fields, "waits": [{"reason": "x", "seconds": 3.0}], **changes}


def cluster(*entries: dict[str, Any], **details: Any) -> Cluster:
    return Cluster("c", "gke", details={"provisioning": list(entries), **details})


def test_times_of_provisioning_as_a_table() -> None:
    made = cluster(entry(), entry("c/x", adopted=True, accepted=None, ready=None), entry("never", began=None))
    assert to_csv([made]).splitlines() == [
        "cluster,provider,phase,kind,resource,adopted,began,accepted,ended,waited",
        "c,gke,making,pool,c/workers,False,1.0,2.0,9.0,3.0",
        "c,gke,making,pool,c/x,True,1.0,,,3.0",
    ]


def test_an_open_resource_ends_with_its_last_known_time() -> None:
    [done, open_one] = list_times(cluster(entry(), entry(ready=None)), "making")
    assert (done.end, open_one.end) == (9.0, 4.0)
    assert (done.title, done.is_adopted, done.accepted) == ("pool  workers", False, 2.0)
    assert [each.title for each in list_times(cluster(entry("c"), entry("x" * 50)), "making")] == [
        *("pool", "pool  " + "x" * 31 + "…"),
    ]


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ({}, "ready after 9.00 s, gke"),
        ({"location": "zone"}, "ready after 9.00 s, gke, zone"),
        ({"nodes": 2, "machine_type": "n1"}, "ready after 9.00 s, gke, 2 × n1"),
        ({"functional_only": True}, "ready after 9.00 s, gke, functional only"),
    ],
)
def test_the_title_of_provisioning_sums_it_up(details: dict[str, Any], words: str) -> None:
    [found] = provisioning_figures([cluster(entry(), **details)])
    assert found.title.replace("\u00a0", " ") == f"How c was made: {words}"
    assert (found.key, found.kind, found.notes) == ("cluster0-making", Kind.SPANS, ())


def test_waiting_is_never_longer_than_the_whole() -> None:
    [found] = provisioning_figures([cluster(entry(waits=[{"reason": "x", "seconds": 100.0}]))])
    assert [(line.label, line.low, line.high) for line in found.lines] == [
        ("requests and polling", (1.0,), (1.0,)),
        ("waiting for the cloud", (1.0,), (9.0,)),
    ]
