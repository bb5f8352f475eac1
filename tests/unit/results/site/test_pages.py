"""Pages of a site: counts, filters, ranks and neighbors, in which order and on how many pages."""

import re
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.results.analysis.series import Measurement
from mlbench_cli.results.site import pages, pictures
from mlbench_cli.results.site.claims import Contest, make_contests
from mlbench_cli.results.site.entries import Refusal
from mlbench_cli.results.site.pages import Look, render_claim, render_overview, render_task
from mlbench_cli.results.site.pictures import contest_figures, draw_offers, draw_trend
from tests.unit.results.site.test_claims import contest, entry

PLAIN = Look("My results", can_verify=False)


def sizes(measured: Measurement, *workers: int, **changes: Any) -> list[Any]:
    """An entry for each number of workers; more workers take longer."""
    return [entry(measured, f"w{count}", 10.0 * count, workers=count, **changes) for count in workers]


def listed(page: str) -> list[str]:
    """The results in the rows of a page's tables."""
    rows = re.findall(r"<tr[^>]*>.*?</tr>", page, re.DOTALL)
    return [found[1] for row in rows if (found := re.search(r"results/([0-9a-f]{12})", row))]


def filters(page: str) -> dict[str, list[str]]:
    selects = re.findall(r'<select name="([a-z-]+)">(.*?)</select>', page)
    return {name: re.findall(r"<option>([^<]*)</option>", options) for name, options in selects}


# --- overview -------------------------------------------------------------------------------------------------------


def test_the_overview_counts_results_runs_and_tasks(measured: Measurement) -> None:
    entries = [entry(measured, "a"), entry(measured, "b"), entry(measured, "c", task="other")]
    page = render_overview(make_contests(entries), PLAIN)
    assert "2 results of 3 runs, 2 tasks." in page
    assert "<h1>My results</h1>" in page
    assert "Rejected archives" not in page
    alone = render_overview(make_contests(entries[:1]), PLAIN, [Refusal("x.zip", "changed", "its CRC-32 is wrong")])
    assert "1 result of 1 run, 1 task." in alone
    assert "Rejected archives" in alone
    assert "<td>x.zip</td><td>its CRC-32 is wrong</td>" in alone


@pytest.mark.parametrize(
    ("can_verify", "words"), [(True, "Choose any mlbench archive"), (False, "mlbench verify FILE")]
)
def test_a_site_with_a_judge_offers_to_check_an_archive(can_verify: bool, words: str, measured: Measurement) -> None:
    page = render_overview(make_contests([entry(measured, "a")]), Look("t", can_verify))
    assert words in page
    assert ("Choose any" in page) == can_verify


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_a_task_has_its_results_in_the_order_of_their_ranks(measured: Measurement) -> None:
    found = contest(*sizes(measured, 4, 1, 2))
    [(name, page)] = render_task([found], "unknown-task", PLAIN).items()
    assert name == "tasks/unknown-task.html"
    assert listed(page) == [claim.id for claim in found.claims]
    assert [claim.point.workers for claim in found.claims] == [1, 2, 4]
    assert "Page 1 of" not in page
    assert render_task([found], "another", PLAIN)["tasks/another.html"].count("<tr") == 0


def test_many_results_are_on_several_pages_with_the_figures_on_the_first(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "ROWS", 2)
    found = contest(*sizes(measured, 1, 2, 3, 4, 5))
    first, second, third = render_task([found], "unknown-task", PLAIN).items()
    assert [first[0], second[0], third[0]] == [
        *("tasks/unknown-task.html", "tasks/unknown-task-2.html", "tasks/unknown-task-3.html"),
    ]
    ids = [claim.id for claim in found.claims]
    assert [listed(page) for _, page in (first, second, third)] == [ids[:2], ids[2:4], ids[4:]]
    assert "Page 2 of 3, best results first" in second[1]
    assert ['class="plot"' in page for _, page in (first, second, third)] == [True, False, False]
    assert "of 2 results" in first[1]
    [whole] = render_task([contest(*sizes(measured, 1, 2))], "unknown-task", PLAIN)
    assert whole == "tasks/unknown-task.html"


def test_filters_are_for_settings_that_differ_with_numbers_in_their_order(measured: Measurement) -> None:
    found = contest(*sizes(measured, 10, 2, 1), entry(measured, "x", 5.0, workers=1, method="bsp", network="1gbit"))
    [page] = render_task([found], "unknown-task", PLAIN).values()
    assert filters(page) == {
        "method": ["bsp", "task&#39;s own"],
        "network": ["1gbit", "none"],
        "workers": ["1", "2", "10"],
    }
    [alone] = render_task([contest(entry(measured, "a"))], "unknown-task", PLAIN).values()
    assert filters(alone) == {}
    assert 'id="filters"' not in alone


def test_results_can_be_filtered_by_who_signed_them(measured: Measurement) -> None:
    found = contest(entry(measured, "a", workers=1, signer="ann"), entry(measured, "b", 200.0, workers=2))
    [page] = render_task([found], "unknown-task", PLAIN).values()
    assert filters(page)["signed-by"] == ["ann", "nobody"]


# --- claims ---------------------------------------------------------------------------------------------------------


def test_a_claim_is_ranked_within_its_division_and_beside_its_neighbors(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five on each side."""
    monkeypatch.setattr(pages, "claim_figures", lambda claim, site: [])
    shown: dict[str, Any] = {}
    monkeypatch.setattr(pages, "_render", lambda template, look, root, **values: shown.update(values) or "page")
    entries = sizes(measured, *range(1, 13))
    key = replace(entries[0].measurement.key, division="open")
    entries[0] = replace(entries[0], measurement=replace(entries[0].measurement, key=key))
    entries.append(entry(measured, "failed", outcome="failed", workers=99))
    found = contest(*entries)
    ranks = {}
    for claim in found.claims:
        assert render_claim(claim, found, PLAIN, None) == ("page", [])  # type: ignore[arg-type]
        ranks[claim.point.workers] = shown["place"], [each.point.workers for each in shown["neighbors"]]
    assert ranks[1] == ((1, 1), [1, 2, 3, 4, 5, 6])
    assert ranks[2][0] == (1, 11)
    assert ranks[7] == ((6, 11), [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert ranks[12] == ((11, 11), [7, 8, 9, 10, 11, 12])
    assert ranks[99] == (None, [])


def test_a_claim_alone_has_no_neighbors(measured: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "claim_figures", lambda claim, site: [])
    shown: dict[str, Any] = {}
    monkeypatch.setattr(pages, "_render", lambda template, look, root, **values: shown.update(values) or "page")
    twice = ("slow-disk", "The disk is slow.", "")
    found = contest(entry(measured, "a", findings=(twice,)), entry(measured, "b", findings=(twice, ("x", "y", "z"))))
    render_claim(found.claims[0], found, PLAIN, None)  # type: ignore[arg-type]
    assert (shown["neighbors"], shown["place"], shown["task_page"]) == ([], (1, 1), "tasks/unknown-task.html")
    assert shown["findings"] == [twice, ("x", "y", "z")]


# --- pictures -------------------------------------------------------------------------------------------------------


def test_figures_of_a_contest_are_named_after_it(measured: Measurement) -> None:
    found = contest(*sizes(measured, 1, 2))
    assert [figure.key for figure in contest_figures(found)] == [f"{found.key}-offers"]
    assert list(contest_figures(contest(*sizes(measured, 1)))) == []


def test_only_the_best_offers_of_a_method_are_drawn(measured: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_OFFERS", 5)
    entries = [
        entry(measured, f"{method}{workers}", 10.0 * workers + extra, workers=workers, method=method)
        for method, extra in (("bsp", 0.0), ("wfbp", 1.0))
        for workers in (1, 2, 3)
    ]
    figure = draw_offers(contest(*entries), "k")
    assert figure is not None
    assert [(line.label, line.ys) for line in figure.lines[:2]] == [("bsp", (10.0, 20.0)), ("wfbp", (11.0, 21.0))]
    assert figure.caption.endswith(" 2 slower results are omitted.")


def test_an_offer_names_machine_network_and_conditions(measured: Measurement) -> None:
    found: Contest = contest(entry(measured, "a", workers=1, network="1gbit"), entry(measured, "b", 50.0, workers=2))
    figure = draw_offers(found, "k")
    assert figure is not None
    assert figure.lines[0].notes == ("2 × EPYC", "1 × EPYC, 1gbit")
    assert figure.lines[0].xs == (100.0, 100.0)


def test_the_longest_trends_come_first_with_their_intervals(measured: Measurement) -> None:
    def claims(method: str, *days: int) -> list[Any]:
        made = []
        for day in days:
            for repeat in range(3):
                each = entry(
                    measured, f"{method}-{day}-{repeat}", 10.0 * day + repeat, folder=f"d{day}", method=method,
                    created=f"2026-01-{day:02}T00:00:00Z",
                )  # fmt: skip
                key = replace(each.measurement.key, code=f"{day}")
                made.append(replace(each, measurement=replace(each.measurement, key=key)))
        return made

    figure = draw_trend(contest(*claims("bsp", 3, 5), *claims("wfbp", 2, 4, 9), *claims("dgc", 7)), "k")
    assert figure is not None
    assert [(line.label.partition(",")[0], line.xs) for line in figure.lines] == [
        ("wfbp", (0.0, 2.0, 7.0)),
        ("bsp", (1.0, 3.0)),
    ]
    low, high = figure.lines[1].low[0], figure.lines[1].high[0]
    assert figure.lines[1].ys[0] == 31.0
    assert [low, high] == pytest.approx([28.516, 33.484], abs=1e-3)  # 31 ± 4.303 / sqrt(3)
    assert figure.x.label == "days since 2026-01-02"
    assert figure.caption == "One line per method, machine and number of workers. Bars: 95 % intervals."
