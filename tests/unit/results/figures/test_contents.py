"""What figures hold before they are drawn: lines, axes, looks, ticks and small multiples, by hand."""

import math
from typing import Any

import pytest

from mlbench_cli.model.run import Cluster
from mlbench_cli.results.analysis.collectives import FACTS, Curve
from mlbench_cli.results.figures.collectives import collective_figures
from mlbench_cli.results.figures.model import (
    Axis,
    Figure,
    Kind,
    Line,
    Scale,
    choose_divider,
)
from mlbench_cli.results.figures.provisioning import provisioning_figures
from mlbench_cli.results.figures.ticks import choose_ticks, format_tick, place_axis, widen


def figure(*lines: Line, x: Axis | None = None, kind: Kind = Kind.LINES, **more: Any) -> Figure:
    return Figure("k", "title", x or Axis("x"), Axis("y"), lines, kind=kind, **more)


# --- lines and figures ----------------------------------------------------------------------------------------------


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


# --- looks ----------------------------------------------------------------------------------------------------------


# --- collectives ----------------------------------------------------------------------------------------------------


def curve(label: str, fit: Any = None, **changes: Any) -> Curve:
    facts = {**dict.fromkeys(FACTS, ""), "backend": "gloo", "ranks": label, "device": "cpu"}
    fields = {"run": "r", "collective": "all_reduce", "dtype": "fp32", "place": "in_place", "machine": "m"}
    points = ((8, 2.0, 0.004), (1024, 4.0, 0.25))
    return Curve(**{**fields, "points": points, "fit": fit, "facts": facts, "label": label, **changes})


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


# --- experiments, plans and predictions -----------------------------------------------------------------------------


# --- provisioning ---------------------------------------------------------------------------------------------------


def entry(name: str = "c/workers", **changes: Any) -> dict[str, Any]:
    fields = {"kind": "pool", "name": name, "adopted": False, "began": 1.0, "accepted": 2.0, "ready": 9.0}
    return {**fields, "waits": [{"reason": "x", "seconds": 3.0}], **changes}


def cluster(*entries: dict[str, Any], **details: Any) -> Cluster:
    return Cluster("c", "gke", details={"provisioning": list(entries), **details})


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
