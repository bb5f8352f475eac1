"""What a reproduction says, in every field: its figures, what was not the same, and how many repeats to make."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.equivalence import LogRatio
from mlbench_cli.results.analysis.reproduction import (
    Answer,
    NotTheSame,
    check_original,
    choose_figures,
    choose_repeats,
    format_margin,
    in_order,
    judge_ratio,
    judge_reproduction,
    unit_of_figure,
)
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.util.times import timestamp
from tests.unit.results.runs import START

Make = Callable[..., list[Archive]]
GOOD = (10.0, 10.2, 9.9)
SLOW = (12.5, 12.7, 12.4)


@pytest.fixture
def make(sealed: Path) -> Make:
    """Repeats of one setting that take these seconds; fields of their result, of their spec and provenance by name."""

    def repeats(name: str, seconds: Sequence[float], **changes: Any) -> list[Archive]:
        spec, provenance = changes.pop("spec", {}), changes.pop("provenance", None)
        begin, found = changes.pop("begin", START), []
        for number, value in enumerate(seconds):
            archive = Archive.open(sealed)
            archive.run["name"] = archive.run["id"] = f"{name}-r{number}"
            archive.run["created"] = archive.result["started"] = timestamp(begin + 60 * number)
            archive.run["spec"].update(spec)
            archive.run["provenance"] = provenance
            archive.result.update({"timings": {}, "task_seconds": {"wall": value, "training": value}, **changes})  # type: ignore[typeddict-item]
            found.append(archive)
        return found

    return repeats


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


# --- answers and ratios ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code", "phrase"),
    [
        (Answer.REPRODUCED, 0, "reproduced"),
        (Answer.DIFFERENT, 7, "different"),
        (Answer.CANNOT_TELL, 9, "cannot tell"),
    ],
)
def test_an_answer_has_the_exit_code_of_the_gate(answer: Answer, code: int, phrase: str) -> None:
    assert (answer.exit_code, answer.phrase) == (code, phrase)


@pytest.mark.parametrize(
    ("ratio", "answer"),
    [
        (1.0, Answer.REPRODUCED),
        (1.999, Answer.REPRODUCED),
        (2.0, Answer.CANNOT_TELL),  # neither within the margin nor beyond it
        (2.001, Answer.DIFFERENT),
        (0.501, Answer.REPRODUCED),
        (0.5, Answer.CANNOT_TELL),
        (0.499, Answer.DIFFERENT),
    ],
)
def test_a_ratio_without_scatter_is_decided_by_the_margin(ratio: float, answer: Answer) -> None:
    """A margin of 100 % is a factor of two in both directions."""
    assert judge_ratio("seconds", LogRatio(math.log(ratio), 0.0, 4), 1.0, 1)[0] is answer


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("mean", "error", "count", "answer"),
    [
        # Student's t with 10 degrees of freedom: 1.812 for 90 %, 2.228 for 95 %, 3.169 for 99 %; ln 1.1 = 0.0953
        (0.0, 0.052, 1, Answer.REPRODUCED),
        (0.0, 0.052, 5, Answer.REPRODUCED),
        (0.0, 0.053, 1, Answer.CANNOT_TELL),
        (math.log(1.5), 0.139, 1, Answer.DIFFERENT),
        (math.log(1.5), 0.140, 1, Answer.CANNOT_TELL),
        (math.log(1.5), 0.097, 5, Answer.DIFFERENT),
        (math.log(1.5), 0.099, 5, Answer.CANNOT_TELL),
    ],
)
def test_equal_needs_a_90_percent_interval_and_different_a_wider_one_for_more_figures(
    mean: float, error: float, count: int, answer: Answer, sign: int
) -> None:
    assert judge_ratio("seconds", LogRatio(sign * mean, error, 10), 0.1, count)[0] is answer


@pytest.mark.parametrize(
    ("ratio", "margin", "reason"),
    [
        (1.05, 0.1, "seconds: reproduced within 5 % (1.050× (1.050 to 1.050); margin 10 %)."),
        (0.9, 0.2, "seconds: reproduced within 11.2 % (0.900× (0.900 to 0.900); margin 20 %)."),
        (9.994, 0.1, "seconds: different, 9.994× (9.994 to 9.994) the original; margin 10 %."),
        (9.996, 0.1, "seconds: different, 10.0× (10.0 to 10.0) the original; margin 10 %."),
        (
            *(2.0, 1.0),
            "seconds: 2.000× (2.000 to 2.000) the original, which is undecided; margin 100 %. More repeats would "
            "narrow the interval.",
        ),
    ],
)
def test_a_reason_has_the_ratio_and_the_margin(ratio: float, margin: float, reason: str) -> None:
    assert plain(judge_ratio("seconds", LogRatio(math.log(ratio), 0.0, 4), margin, 1)[1]) == reason


@pytest.mark.parametrize(
    ("margin", "text"),
    [
        *((0.1, "10 %"), (0.025, "2.5 %"), (0.0251, "2.6 %"), (0.07, "7 %"), (1.0, "100 %"), (0.0001, "0.1 %")),
        *((0.1001, "10.1 %"), (0.0, "0 %")),
    ],
)
def test_a_margin_is_rounded_up(margin: float, text: str) -> None:
    assert plain(format_margin(margin)) == text


@pytest.mark.parametrize(
    ("name", "unit"),
    [("seconds", "s"), ("throughput", "samples/s"), ("Prec@1", "%"), ("a busbw GB/s", "GB/s")],
)
def test_a_figure_has_the_unit_of_its_values(name: str, unit: str) -> None:
    assert unit_of_figure(name) == unit


# --- the document ---------------------------------------------------------------------------------------------------


def test_a_reproduction_as_a_receipt_has_it(make: Make) -> None:
    """Interval and p-value are those of scipy.stats.ttest_ind (equal_var=False) on logarithms."""
    again = (10.1, 9.9, 10.15)
    found = judge_reproduction(make("a", GOOD), make("b", again)).to_dict()
    [figure] = found["figures"]
    assert found == {
        "verdict": "reproduced",
        "reason": figure["reason"],
        "margin": 0.1,
        "level": 0.05,
        "figures": [
            {
                "name": "seconds",
                "verdict": "reproduced",
                "reason": figure["reason"],
                "original": [10.0, 10.2, 9.9],
                "reproduction": [10.1, 9.9, 10.15],
                "ratio": pytest.approx((10.1 * 9.9 * 10.15 / (10.0 * 10.2 * 9.9)) ** (1 / 3)),
                "low": pytest.approx(0.9770348383502839),
                "high": pytest.approx(1.0269471952428917),
                "p": pytest.approx(0.0006982063391964976),
            }
        ],
        "not_the_same": [
            {"name": "time", "original": "1 session", "reproduction": "1 session, 1 of them common", "matters": False}
        ],
        "sessions": "one session: the interval has no session spread",
    }
    assert plain(figure["reason"]).startswith("seconds: reproduced within ")


def test_repeats_of_another_day_are_another_session(make: Make) -> None:
    found = judge_reproduction(make("a", GOOD), make("b", GOOD, begin=START + 86400))
    assert found.not_the_same[-1] == NotTheSame("time", "1 session", "1 session, at another time", False)
    assert found.sessions == "one session on a side, so the interval has no session spread"


def test_sessions_with_both_sides_are_compared_in_pairs(make: Make) -> None:
    """Both sessions differ by half, and in each the repeat takes 1 % longer."""
    a = make("a", (10.0,)) + make("c", (15.0,), begin=START + 86400)
    b = make("b", (10.1,), begin=START + 60) + make("d", (15.15,), begin=START + 86460)
    found = judge_reproduction(a, b)
    [figure] = found.figures
    assert [figure.ratio, figure.low, figure.high] == pytest.approx([1.01] * 3)
    assert found.sessions == "2 sessions with both sides: one difference for each"
    assert found.not_the_same[-1] == NotTheSame("time", "2 sessions", "2 sessions, 2 of them common", False)


def test_sides_of_several_sessions_are_compared_by_the_means_of_sessions(make: Make) -> None:
    """The ratio is that of the geometric means of 10 and 20, and of 12 and 20, and not that of all runs."""
    day = 86400
    a = make("a", (9.0, 11.0)) + make("b", (20.0,), begin=START + day)
    b = make("c", (12.0,), begin=START + 2 * day) + make("d", (20.0, 20.0, 20.0), begin=START + 3 * day)
    found = judge_reproduction(a, b)
    assert found.figures[0].ratio == pytest.approx(math.sqrt(12 * 20 / (10 * 20)))
    assert found.sessions == "2 and 2 sessions: one mean for each"


def test_all_figures_have_to_agree_and_the_worst_is_the_reason(make: Make) -> None:
    asked = ["Prec@1", "seconds"]
    same = judge_reproduction(make("a", GOOD), make("b", GOOD), asked=asked)
    assert plain(same.reason).startswith("All 2 figures are. Prec@1: reproduced within 0 % ")
    slow = judge_reproduction(make("a", GOOD), make("b", SLOW), asked=asked)
    assert slow.reason.startswith("seconds: different")
    torn = judge_reproduction(make("a", GOOD), make("b", (9.0, 13.0, 11.0)), asked=asked)
    assert torn.reason.startswith("seconds: ")
    assert (torn.answer, slow.answer, same.answer) == (Answer.CANNOT_TELL, Answer.DIFFERENT, Answer.REPRODUCED)


def test_a_figure_without_values_or_repeats_cannot_be_judged(make: Make) -> None:
    again = [*make("b", GOOD[:2]), *make("c", GOOD[:1], samples=None)]
    found = judge_reproduction(make("a", GOOD), again, asked=["throughput"])
    assert (found.answer, found.reason) == (Answer.CANNOT_TELL, "Some repeats lack throughput.")
    assert len(found.figures[0].reproduction) == 2
    one = judge_reproduction(make("a", GOOD[:1]), make("b", GOOD[:1]))
    assert one.reason == "seconds: 1 and 1 values give no interval; add repeats."
    none = judge_reproduction(make("a", GOOD), [])
    assert (none.answer, none.reason) == (Answer.CANNOT_TELL, "Some repeats lack seconds.")


# --- runs that ended otherwise --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missed", "reached", "answer", "reason"),
    [
        (3, 0, Answer.DIFFERENT, "All 3 runs missed the goal, which the original reached."),
        (2, 0, Answer.CANNOT_TELL, "2 of 2 runs missed the goal, which the original reached."),
        (3, 1, Answer.CANNOT_TELL, "3 of 4 runs missed the goal, which the original reached."),
    ],
)
def test_three_runs_that_all_miss_the_goal_are_a_difference(
    make: Make, missed: int, reached: int, answer: Answer, reason: str
) -> None:
    again = make("b", GOOD[:missed], outcome="goal_missed") + make("c", GOOD[:reached])
    found = judge_reproduction(make("a", GOOD), again)
    assert (found.answer, found.reason) == (answer, reason)


def test_one_failed_run_outweighs_those_that_missed_the_goal(make: Make) -> None:
    again = make("b", GOOD, outcome="goal_missed") + make("c", GOOD[:1], outcome="timed_out")
    found = judge_reproduction(make("a", GOOD), again)
    assert (found.answer, found.reason) == (Answer.CANNOT_TELL, "c-r0 ended as timed out.")


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_functional_run_on_either_side_decides_nothing(make: Make, side: str) -> None:
    label = {"word": "functional", "reason": "one node"}
    a, b = (make(name, GOOD, **({"label": label} if name == side else {})) for name in "ab")
    found = judge_reproduction(a, b)
    assert found.answer is Answer.CANNOT_TELL
    assert found.reason == f"{side}-r0 is functional, not a performance measurement: one node."


# --- what was not the same ------------------------------------------------------------------------------------------


def surroundings(found: Any) -> list[tuple[str, str, str, bool]]:
    return [(each.name, each.original, each.reproduction, each.matters) for each in found.not_the_same[:-1]]


def test_another_number_of_workers_is_another_request(make: Make) -> None:
    found = judge_reproduction(make("a", GOOD), make("b", GOOD, workers=4))
    assert found.answer is Answer.CANNOT_TELL
    assert found.reason == "The requests differ. The numbers of workers differ: 2 and 4."
    assert surroundings(found) == [("numbers of workers", "2", "4", True)]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"spec": {"cluster_kind": "gke/n1-standard-4"}}, "kinds of cluster"),
        ({"spec": {"functional_only": "one node"}}, "labels"),
        ({"provenance": {"machine": {"cpu": "Xeon"}}}, "machines"),
        ({"provenance": {"code": {"digest": "0f" * 16}}}, "digests of the code"),
        ({"division": {"word": "open", "reason": None}}, "divisions"),
        ({"judge": 2}, "versions of the judge"),
    ],
)
def test_machines_releases_and_judges_may_differ_and_matter(make: Make, changes: dict[str, Any], name: str) -> None:
    same = judge_reproduction(make("a", GOOD), make("b", GOOD, **changes))
    assert same.answer is Answer.REPRODUCED
    assert [(each, matters) for each, _, _, matters in surroundings(same)] == [(name, True)]
    slower = judge_reproduction(make("a", GOOD), make("b", SLOW, **changes))
    assert slower.answer is Answer.CANNOT_TELL
    assert slower.reason.endswith(f"But there were other differences: {name}.")


def test_another_framework_is_no_other_request(make: Make) -> None:
    a, b = make("a", GOOD), make("b", GOOD)
    for archive in b:
        ranks: Any = archive.environment["ranks"]
        ranks["0"]["version"] = "2.16.0"
    found = judge_reproduction(a, b)
    assert (found.answer, surroundings(found)) == (
        Answer.REPRODUCED,
        [("versions of the framework", "torch 2.15.0", "torch 2.16.0", True)],
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"spec": {"backend": "mpi"}}, "backends"),
        ({"spec": {"preset": "tiny"}}, "presets"),
        ({"spec": {"method": {"name": "bsp"}}}, "methods"),
        ({"spec": {"network": "1gbit"}}, "networks"),
        ({"spec": {"parameters": {"batch_size": 64}}}, "values of batch_size"),
        ({"data": "other"}, "data"),
        ({"synthetic": True}, "kinds of data"),
    ],
)
def test_what_was_asked_for_may_not_differ(make: Make, changes: dict[str, Any], name: str) -> None:
    found = judge_reproduction(make("a", GOOD), make("b", GOOD, **changes))
    assert found.answer is Answer.CANNOT_TELL
    assert found.reason.startswith(f"The requests differ. The {name} differ: ")
    slower = judge_reproduction(make("a", GOOD), make("b", SLOW, **changes))
    assert slower.answer is Answer.DIFFERENT
    assert slower.reason.startswith("seconds: different")


def test_the_place_of_a_run_is_no_other_request(make: Make) -> None:
    spec = {"engine": "kubernetes", "kubernetes": {"memory": "8Gi"}}
    found = judge_reproduction(make("a", GOOD), make("b", GOOD, spec=spec))
    assert found.answer is Answer.REPRODUCED
    names = [name for name, *_ in surroundings(found)]
    assert "values of engine" in names
    assert "values of kubernetes.memory" in names
    assert all(matters for *_, matters in surroundings(found))


def test_a_difference_may_come_from_conditions_of_either_side(make: Make) -> None:
    conditions = {
        "measured": True,
        "labels": ["shared"],
        "crowded": None,
        "contended": None,
        "quota_limited": None,
        "shared": {"reason": "x", "figures": {}},
    }
    found = judge_reproduction(make("a", GOOD), make("b", SLOW, conditions=conditions))
    assert surroundings(found) == [("conditions", "none", "shared", True)]
    assert found.answer is Answer.CANNOT_TELL
    assert found.reason.endswith("But there were other differences: conditions.")
    both = judge_reproduction(make("a", GOOD, conditions=conditions), make("b", SLOW, conditions=conditions))
    assert (surroundings(both), both.answer) == ([], Answer.DIFFERENT)


def test_a_slower_network_is_a_difference_of_the_surroundings(make: Make) -> None:
    network = {
        "networks": 2,
        "asked": None,
        "rtt_seconds": 0.001,
        "together_bits_per_second": 1e9,
        "alone_bits_per_second": 1e9,
    }
    slow = {**network, "together_bits_per_second": 1e8, "alone_bits_per_second": 1e8}
    found = judge_reproduction(make("a", GOOD, network=network), make("b", GOOD, network=slow))
    [(name, _, _, matters)] = surroundings(found)
    assert (name, matters) == ("measured networks", True)


def provenance(packages: dict[str, str], **changes: Any) -> dict[str, Any]:
    machine = {"platform": "Linux 6.1", "memory_bytes": 2 * 10**9, "gpu_driver": "550", **changes.pop("machine", {})}
    return {"mlbench": "4.0.0", "python": "3.12.1", "machine": machine, "packages": packages, **changes}


def test_software_and_machines_are_compared_fact_by_fact(make: Make) -> None:
    machine = {"platform": "Linux 6.8", "memory_bytes": 4 * 10**9, "gpu_driver": None}
    after = provenance({"numpy": "2"}, machine=machine, mlbench="4.1.0", python="3.13.0")
    a, b = make("a", GOOD, provenance=provenance({"torch": "2.9"})), make("b", GOOD, provenance=after)
    found = judge_reproduction(a, b)
    assert [(name, plain(old), plain(new), matters) for name, old, new, matters in surroundings(found)] == [
        ("GPU driver", "550", "unknown", True),
        ("memory", "2.00 GB", "4.00 GB", False),
        ("operating system", "Linux 6.1", "Linux 6.8", False),
        ("Python", "3.12.1", "3.13.0", False),
        ("mlbench", "4.0.0", "4.1.0", False),
        ("package numpy", "none", "2", False),
        ("package torch", "2.9", "none", False),
    ]


@pytest.mark.parametrize(("count", "more"), [(5, []), (6, [("packages", "–", "1 more differ", False)])])
def test_five_packages_are_named(make: Make, count: int, more: list[Any]) -> None:
    before, after = ({f"p{number}": version for number in range(count)} for version in "12")
    found = judge_reproduction(
        make("a", GOOD, provenance=provenance({**before, "same": "1"})),
        make("b", GOOD, provenance=provenance({**after, "same": "1"})),
    )
    assert surroundings(found) == [*((f"package p{number}", "1", "2", False) for number in range(5)), *more]


def test_without_provenance_of_both_sides_nothing_is_compared(make: Make) -> None:
    found = judge_reproduction(make("a", GOOD), make("b", GOOD, provenance=provenance({"torch": "2"})))
    assert surroundings(found) == []


# --- what is refused ------------------------------------------------------------------------------------------------


def test_originals_that_are_no_single_result_have_their_own_words(make: Make) -> None:
    failed = make("f", GOOD[:1], outcome="never_started")
    for original, message, hint in (
        (failed, "f-r0 ended as never started: it has no result to reproduce.", "Leave it out."),
        (
            make("a", GOOD[:1]) + make("b", GOOD[:1], workers=4, begin=START + 5),
            "a-r0 and b-r0 have different numbers of workers, 2 and 4.",
            "Reproduce one size at a time: name its runs or their archives.",
        ),
        (
            make("a", GOOD[:1]) + make("b", GOOD[:1], data="other", begin=START + 5),
            "a-r0 and b-r0 are not repeats of one run. The data differ: digits and other.",
            "Reproduce one setting at a time: name its runs or their archives.",
        ),
    ):
        with pytest.raises(UsageError) as caught:
            check_original(original)
        assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize("margin", [0.0, 10.0, -0.1, math.inf])
def test_a_margin_has_its_limits_in_words(make: Make, margin: float) -> None:
    with pytest.raises(UsageError, match="it must be above 0 and below 10") as caught:
        judge_reproduction(make("a", GOOD), make("b", GOOD), margin)
    assert caught.value.hint == "0.1 means 10 %."


def test_margins_just_within_the_limits_are_allowed(make: Make) -> None:
    a = make("a", GOOD)
    assert judge_reproduction(a, make("b", GOOD), 9.99).answer is Answer.REPRODUCED
    assert judge_reproduction(a, make("b", GOOD), 0.001).answer is Answer.CANNOT_TELL


def test_an_original_does_not_reproduce_itself(make: Make) -> None:
    a = make("a", GOOD)
    with pytest.raises(UsageError) as caught:
        judge_reproduction(a, [*make("b", GOOD), a[1]])
    assert caught.value.message == "a-r1 is one of the original runs, so it cannot reproduce the original."


def test_runs_are_ordered_by_their_time_and_then_by_name(make: Make) -> None:
    late, early = make("a", GOOD[:2], begin=START + 60), make("b", GOOD[:2])
    assert [each.run["name"] for each in in_order([*late, *early, late[0]])] == ["b-r0", "a-r0", "b-r1", "a-r1"]


# --- figures and repeats --------------------------------------------------------------------------------------------


def test_figures_that_are_asked_for_keep_their_order_and_count_once(make: Make) -> None:
    a = make("a", GOOD)
    assert choose_figures(a, ["throughput", "seconds", "throughput"]) == ["throughput", "seconds"]
    with pytest.raises(UsageError) as caught:
        choose_figures(a, ["seconds", "x" * 70])
    assert caught.value.message == f'The original has no figure "{"x" * 60}".'
    assert caught.value.hint == "One of: Prec@1, seconds, throughput"


def test_a_figure_must_be_known_of_every_repeat(make: Make) -> None:
    a = [*make("a", GOOD[:2]), *make("b", GOOD[:1], samples=None)]
    with pytest.raises(UsageError, match='no figure "throughput"'):
        choose_figures(a, ["throughput"])
    assert choose_figures(a) == ["seconds"]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["seconds"]),
        ({"budget_seconds": 60.0}, ["Prec@1"]),
        ({"goal": None}, ["throughput"]),
        ({"goal": None, "samples": None}, ["seconds"]),
        ({"goal": None, "budget_seconds": 60.0}, ["throughput"]),
    ],
)
def test_without_a_wish_the_figure_is_what_a_result_is_about(
    make: Make, changes: dict[str, Any], names: list[str]
) -> None:
    assert choose_figures(make("a", GOOD, **changes)) == names


def test_the_noisiest_figure_decides_the_number_of_repeats(make: Make) -> None:
    calm, noisy = make("a", (10.0, 10.01, 10.02)), make("b", (10.0, 11.0, 12.0))
    few, many = (choose_repeats(side, ["seconds"], 0.1) for side in (calm, noisy))
    assert few.number == 3
    assert many.number > few.number
    assert many.margin is not None
    assert few.margin is not None
    assert many.margin > 0.1 > few.margin
    assert choose_repeats(noisy, ["Prec@1", "seconds"], 0.1) == choose_repeats(noisy, ["seconds"], 0.1)
    assert choose_repeats(noisy, ["Prec@1"], 0.1) == (3, 0.0)  # it never differs


def test_a_figure_that_reaches_zero_has_no_spread_of_logarithms(make: Make) -> None:
    goal = {**make("x", GOOD[:1])[0].result["goal"], "value": 0.0, "last": 0.0}  # type: ignore[dict-item]
    assert choose_repeats(make("a", GOOD, goal=goal), ["Prec@1"], 0.1) == (3, 0.0)


@pytest.mark.parametrize(("count", "repeats"), [(1, (5, None))])
def test_the_spread_of_a_single_run_is_unknown(make: Make, count: int, repeats: tuple[int, None]) -> None:
    assert choose_repeats(make("a", GOOD[:count]), ["seconds"], 0.1) == repeats
