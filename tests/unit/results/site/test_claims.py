"""Which results of a site belong together, how they are ranked and priced, and what its index says of them."""

from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.results.analysis.series import Measurement
from mlbench_cli.results.site.claims import (
    Claim,
    Contest,
    ReceiptNote,
    attach_receipts,
    describe_setting,
    make_contests,
)
from mlbench_cli.results.site.entries import Entry, Withdrawal
from mlbench_cli.results.site.pictures import draw_offers, draw_trend


def entry(measured: Measurement, name: str, seconds: float = 100.0, folder: str = "f", **changes: Any) -> Entry:
    """An entry of the site; fields of its measurement and of its key are taken from `changes`, too."""
    names = ("outcome", "value", "workers", "throughput")
    own = {key: changes.pop(key) for key in names if key in changes}
    facts = {key: changes.pop(key) for key in ("method", "network", "preset", "task", "machine") if key in changes}
    measurement = replace(
        measured, name=name, source=f"{folder}/{name}.zip", seconds=seconds, key=replace(measured.key, **facts), **own
    )
    fields: dict[str, Any] = {
        "digest": f"digest-{name}",
        "file": f"archives/{name}.zip",
        "sha256": f"sha-{name}",
        "size": 10,
        "source": measurement.source,
        "name": name,
        "run": f"id-{name}",
        "created": "2026-01-02T03:04:05Z",
        "mlbench": "1.0",
        "seed": 7,
        "machine": "EPYC",
        "measurement": measurement,
        "price": None,
        "has_own_price": False,
        "energy": None,
        "wall_seconds": seconds,
        "summary": "s",
        "official_line": None,
        "findings": (),
        "signer": None,
        "origin": "not signed",
        "disclosed": {},
        "said": {},
    }
    return Entry(**{**fields, **changes})


def contest(*entries: Entry, **options: Any) -> Contest:
    [found] = make_contests(entries, **options)
    return found


def claim(*entries: Entry, **options: Any) -> Claim:
    [found] = contest(*entries, **options).claims
    return found


def test_a_claim_as_the_index_has_it(measured: Measurement) -> None:
    found = claim(
        entry(measured, "a", 90.0, price=1.0, signer="ann"),
        entry(measured, "b", 110.0, price=3.0, signer="bob", created="2026-01-01T00:00:00Z", mlbench="0.9"),
        entry(measured, "c", 1.0, outcome="failed", price=9.0, signer="ann"),
    )
    document = found.to_dict()
    archives = document.pop("archives")
    assert document == {
        "id": found.id,
        "page": f"results/{found.id}.html",
        "task": "unknown-task",
        "preset": "spec",
        "goal": found.facts["goal"],
        "division": "none",
        "machine": "EPYC",
        "method": "task's own",
        "network": None,
        "workers": 2,
        "value": 100.0,
        "low": pytest.approx(90.0),
        "high": pytest.approx(110.0),
        "unit": "s",
        "runs": 2,
        "failed_runs": 1,
        "cost_usd": 2.0,
        "cost_is_list_price": True,
        "energy_joules": None,
        "energy_source": None,
        "conditions": [],
        "signers": ["ann", "bob"],
        "date": "2026-01-01",
        "mlbench": "0.9, 1.0",
        "status": "stands",
        "receipts": [],
    }
    assert isinstance(archives, list)
    assert archives[0] == {
        "file": "archives/a.zip",
        "digest": "digest-a",
        "sha256": "sha-a",
        "bytes": 10,
        "seed": 7,
        "signer": "ann",
    }
    assert [each["seed"] for each in archives] == [7, 7, 7]
    assert len(found.id) == 12


def test_a_claim_in_words(measured: Measurement) -> None:
    found = claim(entry(measured, "a", 90.0), entry(measured, "b", 110.0), entry(measured, "c", outcome="failed"))
    assert found.title == "unknown-task, task's own, 2 workers"
    assert found.counted == "2 of 3"
    assert found.value_text.replace("\u00a0", " ") == "100 s (90 to 110 range)"
    assert found.division_text == "no division"
    assert found.worker_seconds == 200.0
    assert "samples/s" in found.throughput_text
    assert dict(describe_setting(found))["backend"] == "gloo"
    assert "network" not in dict(describe_setting(found))
    tiny = claim(entry(measured, "a", preset="tiny", network="1gbit", method="bsp", workers=1))
    assert tiny.title == "unknown-task (tiny), bsp, 1 worker, 1gbit"
    assert tiny.counted == "1"


def test_a_claim_without_a_success_says_how_its_runs_ended(measured: Measurement) -> None:
    found = claim(entry(measured, "a", outcome="goal_missed"), entry(measured, "b", outcome="failed"))
    assert (found.value_text, found.throughput_text) == ("failed, goal missed", "–")
    assert (found.value, found.cost, found.worker_seconds, found.is_good) == (None, None, None, False)
    assert (found.to_dict()["value"], found.to_dict()["low"]) == (None, None)


def test_the_submitter_names_the_machine(measured: Measurement) -> None:
    assert claim(entry(measured, "a", said={"hardware": "my box"})).machine == "my box"
    assert claim(entry(measured, "a")).machine == "EPYC"


def test_a_value_after_a_time_budget_is_the_metric(measured: Measurement) -> None:
    runs = [entry(measured, str(value), outcome="budget_spent", value=value) for value in (70.0, 80.0)]
    found = claim(*runs)
    assert (found.unit, found.to_dict()["unit"], found.to_dict()["value"]) == ("%", "Prec@1", 75.0)
    better = entry(measured, "c", outcome="budget_spent", value=79.0, workers=4)
    assert [each.point.workers for each in contest(*runs, better).claims] == [4, 2]
    assert draw_offers(contest(*runs, better), "k") is None


# --- cost and energy ------------------------------------------------------------------------------------------------


def test_a_cost_is_the_price_of_successful_runs_or_that_of_worker_hours(measured: Measurement) -> None:
    """2 workers for half an hour at 3 dollars: 3 dollars."""
    priced, free = entry(measured, "a", price=1.0), entry(measured, "b", wall_seconds=1800.0)
    failed = entry(measured, "c", outcome="failed", price=100.0)
    found = claim(priced, failed)
    assert found.cost is not None
    assert (found.cost.mean, found.has_list_price) == (1.0, True)
    assert claim(priced, free).cost is None
    hourly = claim(priced, free, worker_hour=3.0)
    assert hourly.cost is not None
    assert (hourly.cost.mean, hourly.has_list_price) == (2.0, False)
    assert not claim(entry(measured, "a", price=1.0, has_own_price=True)).has_list_price
    assert claim(free).to_dict()["cost_is_list_price"] is None


def test_signers_are_named_if_all_archives_are_signed(measured: Measurement) -> None:
    ann, bob, none = (entry(measured, name, signer=name) for name in ("ann", "bob", "x"))
    assert claim(bob, ann).signers == ("ann", "bob")
    assert claim(ann, replace(none, signer=None)).signers == ()
    assert claim(ann, replace(none, signer="ann")).signers == ("ann",)


# --- contests -------------------------------------------------------------------------------------------------------


def test_the_fastest_comes_first_then_failures_and_last_what_was_withdrawn(measured: Measurement) -> None:
    entries = [
        entry(measured, "slow", 200.0, workers=1),
        entry(measured, "fast", 50.0, workers=4),
        entry(measured, "failed", outcome="failed", workers=8),
        entry(measured, "gone", 1.0, workers=16),
    ]
    gone = Withdrawal("digest-gone", "2026-02-01", "ann", "wrong data")
    found = contest(*entries, withdrawn=[gone])
    assert [each.point.workers for each in found.claims] == [4, 1, 8, 16]
    assert [each.is_good for each in found.claims] == [True, True, False, False]
    assert found.fastest is found.claims[0]
    assert [each.withdrawn for each in found.claims] == [(), (), (), (gone,)]
    assert found.claims[3].id.endswith("-withdrawn")
    assert found.claims[3].to_dict()["status"] == "withdrawn"
    assert contest(entries[2]).fastest is None


def test_repeats_are_withdrawn_together_within_their_folder(measured: Measurement) -> None:
    """Without its slowest repeat a result would look better."""
    repeats = [entry(measured, "a", 90.0), entry(measured, "b", 500.0), entry(measured, "c", 100.0, folder="other")]
    found = contest(*repeats, withdrawn=[Withdrawal("digest-b", "d", "x", "slow")])
    assert [(len(each.entries), bool(each.withdrawn)) for each in found.claims] == [(1, False), (2, True)]
    assert found.claims[0].entries[0].name == "c"


def test_a_run_counts_once_and_its_first_archive_stands(measured: Measurement) -> None:
    first = entry(measured, "a", 90.0)
    again = replace(entry(measured, "b", 10.0), run=first.run)
    assert [each.name for each in claim(first, again).entries] == ["a"]


def test_the_cheapest_has_the_lowest_known_cost(measured: Measurement) -> None:
    found = contest(
        entry(measured, "a", 50.0, workers=4, price=9.0),
        entry(measured, "b", 100.0, workers=2, price=2.0),
        entry(measured, "c", 10.0, workers=8),
    )
    assert found.cheapest is not None
    assert found.cheapest.point.workers == 2
    assert contest(entry(measured, "c")).cheapest is None


def test_contests_are_sorted_by_task_and_named_with_their_preset(measured: Measurement) -> None:
    entries = [
        entry(measured, name, task=task, preset=preset)
        for name, task, preset in (("a", "b-task", "tiny"), ("b", "a-task", "spec"))
    ]
    found = make_contests(entries)
    assert [each.job.task for each in found] == ["a-task", "b-task"]
    assert [each.title for each in found] == ["a-task", "b-task (tiny)"]
    assert all(len(each.key) == 8 for each in found)
    assert found[0].key != found[1].key


def test_receipts_belong_to_the_original_and_to_the_reproduction(measured: Measurement) -> None:
    note = ReceiptNote("r.json", "reproduced", "x", 0.1, "now", ("digest-a",), ("digest-b",), None)
    entries = [entry(measured, "a", workers=1), entry(measured, "b", workers=2), entry(measured, "c", workers=4)]
    [found] = attach_receipts([contest(*entries)], [note])
    assert {each.point.workers: each.receipts for each in found.claims} == {1: (note,), 2: (note,), 4: ()}
    assert [each.to_dict()["receipts"] for each in found.claims if each.point.workers == 1] == [["r.json"]]


# --- pictures -------------------------------------------------------------------------------------------------------


def test_offers_are_drawn_by_method_over_their_cost(measured: Measurement) -> None:
    found = contest(
        entry(measured, "a", 50.0, workers=4, price=9.0, method="bsp"),
        entry(measured, "b", 100.0, workers=2, price=2.0, method="bsp"),
        entry(measured, "c", 70.0, workers=2, price=3.0, method="wfbp"),
        entry(measured, "d", 10.0, workers=8, method="wfbp"),  # without a price
    )
    figure = draw_offers(found, "k")
    assert figure is not None
    assert (figure.title, figure.x.label, figure.y.unit) == ("Time against cost", "US dollars per run", "s")
    bsp, wfbp, front = figure.lines
    assert (bsp.label, bsp.xs, bsp.ys, bsp.is_joined) == ("bsp", (9.0, 2.0), (50.0, 100.0), False)
    assert bsp.notes == ("4 × EPYC", "2 × EPYC")
    assert (wfbp.xs, wfbp.panel) == ((3.0,), "during the backward pass")
    assert (front.xs, front.ys) == ((2.0, 3.0, 3.0, 9.0, 9.0), (100.0, 100.0, 70.0, 70.0, 50.0))
    assert figure.caption == "Lower left is better. Dashed: no other result is both faster and cheaper."


def test_without_prices_offers_are_drawn_over_worker_seconds(measured: Measurement) -> None:
    two = [entry(measured, "a", 50.0, workers=4), entry(measured, "b", 80.0, workers=2)]
    figure = draw_offers(contest(*two), "k")
    assert figure is not None
    assert (figure.title, figure.x.label) == ("Time against worker-seconds", "worker-seconds")
    assert figure.lines[0].xs == (200.0, 160.0)
    assert draw_offers(contest(two[0]), "k") is None


def test_a_trend_needs_two_days_of_one_setting(measured: Measurement) -> None:
    """Two parameters make two claims of one method, machine and size."""
    old = entry(measured, "a", 50.0, created="2026-01-01T00:00:00Z", mlbench="0.9")
    key = replace(old.measurement.key, code="other")
    new = entry(measured, "b", 40.0, created="2026-01-11T00:00:00Z")
    new = replace(new, measurement=replace(new.measurement, key=key))
    figure = draw_trend(contest(old, new), "k")
    assert figure is not None
    [line] = figure.lines
    assert (line.label, line.xs, line.ys) == ("task's own, EPYC, 2 workers", (0.0, 10.0), (50.0, 40.0))
    assert line.notes == ("mlbench 0.9, 2026-01-01", "mlbench 1.0, 2026-01-11")
    assert (figure.x.label, figure.y.from_zero) == ("days since 2026-01-01", True)
    assert figure.caption.endswith("mlbench 0.9 from 2026-01-01, 1.0 from 2026-01-11.")
    same_day = replace(new, created=old.created)
    assert draw_trend(contest(old, same_day), "k") is None
