"""Scripts of faults in detail: how each line is read and written, its limits, its plan, and the arithmetic of
checkpoints."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.faults import (
    MAX_ITEMS,
    MAX_TEXT,
    CheckpointCopy,
    Fault,
    FaultKind,
    FaultScript,
    Item,
    Policy,
    best_interval,
    expected_attempts,
    expected_ettr,
    parse_every,
    parse_faults,
    plan_of,
    read_faults,
)
from mlbench_cli.model.spec import RunSpec


def item(
    kind: FaultKind, at: float | None = 5.0, every: float | None = None, target: int | None = None, **more: Any
) -> Item:
    return Item(kind, at, every, **{"is_random": False, "target": target, "seconds": None, **more})


KILL, STOP, SLOW, LINK, DISK, STORAGE, NODE = FaultKind


@pytest.mark.parametrize(
    ("text", "parsed", "written"),
    [
        ("at 5s kill rank 3", item(KILL, target=3), "at 5s kill rank 3"),
        ("AT 5s Kill Any Rank", item(KILL), "at 5s kill any rank"),
        ("at 5 kill rank 0", item(KILL, target=0), "at 5s kill rank 0"),
        ("at 0s kill rank 1", item(KILL, 0.0, target=1), "at 0s kill rank 1"),
        ("at 1.5m kill rank 1", item(KILL, 90.0, target=1), "at 90s kill rank 1"),
        ("at 2h kill rank 1", item(KILL, 7200.0, target=1), "at 7200s kill rank 1"),
        ("at 0.25s kill rank 1", item(KILL, 0.25, target=1), "at 0.25s kill rank 1"),
        ("every 600s kill any rank", item(KILL, None, 600.0), "every 600s kill any rank"),
        ("every ~10m kill any rank", item(KILL, None, 600.0, is_random=True), "every ~600s kill any rank"),
        ("at 5s stop rank 1", item(STOP, target=1), "at 5s stop rank 1"),
        ("at 5s for 20s stop rank 1", item(STOP, target=1, seconds=20.0), "at 5s for 20s stop rank 1"),
        ("for 20s at 5s stop rank 1", item(STOP, target=1, seconds=20.0), "at 5s for 20s stop rank 1"),
        ("at 5s slow rank 2 to 50% cpu", item(SLOW, target=2, share=0.5), "at 5s slow rank 2 to 50% cpu"),
        ("at 5s slow any rank to 2.5%cpu", item(SLOW, share=0.025), "at 5s slow any rank to 2.5% cpu"),
        ("at 5s link 2 down", item(LINK, target=2, rate=0.0), "at 5s link 2 down"),
        ("at 5s link any 10mbit", item(LINK, rate=1e7), "at 5s link any 10mbit"),
        ("at 5s link 0 loss 2%", item(LINK, target=0, share=0.02), "at 5s link 0 loss 2%"),
        ("at 5s link 0 loss 99.5%", item(LINK, target=0, share=0.995), "at 5s link 0 loss 99.5%"),
        ("at 5s disk full", item(DISK), "at 5s disk full"),
        ("at 5s for 1m disk full", item(DISK, seconds=60.0), "at 5s for 60s disk full"),
        (
            "at 5s slow storage of rank 1 to 5MB/s",
            item(STORAGE, target=1, rate=5e6),
            "at 5s slow storage of rank 1 to 5MB/s",
        ),
        (
            "at 5s slow storage of any rank to 0.5 mb/s",
            item(STORAGE, rate=5e5),
            "at 5s slow storage of any rank to 0.5MB/s",
        ),
        ("at 5s node 1 gone", item(NODE, target=1), "at 5s node 1 gone"),
        ("at 5s node any gone", item(NODE), "at 5s node any gone"),
    ],
)
def test_a_line_is_read_and_written(text: str, parsed: Item, written: str) -> None:
    script = parse_faults(text)
    assert script == FaultScript((parsed,))
    assert str(script) == written
    assert parse_faults(written) == script


@pytest.mark.parametrize(
    ("text", "items", "seed", "is_forced"),
    [
        ("at 1s kill rank 0; at 2s kill rank 1", 2, None, False),
        ("at 1s kill rank 0\nat 2s kill rank 1\n\n", 2, None, False),
        (";; at 1s kill rank 0 ;", 1, None, False),
        ("# only a remark\nat 1s kill rank 0 # another; at 2s kill rank 1", 1, None, False),
        ("seed 7; at 1s kill rank 0", 1, 7, False),
        ("at 1s kill rank 0; seed 0", 1, 0, False),
        ("at 1s kill rank 0; seed 4294967295; anyway", 1, 4294967295, True),
        ("at 1s kill rank 0; seed 1; seed 2", 1, 2, False),
    ],
)
def test_a_script_is_lines_with_a_seed_and_a_word(text: str, items: int, seed: int | None, is_forced: bool) -> None:
    script = parse_faults(text)
    assert (len(script.items), script.seed, script.is_forced) == (items, seed, is_forced)
    assert parse_faults(str(script)) == script


def test_a_script_is_written_with_its_seed_last_and_then_its_word() -> None:
    assert str(parse_faults("anyway; seed 7; at 1s kill rank 0")) == "at 1s kill rank 0; seed 7; anyway"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "a seed is one number from 0 to 4294967295."),
        ("seed 1 2", "a seed is one number from 0 to 4294967295."),
        ("seed 4294967296", "a seed is one number from 0 to 4294967295."),
        ("seed -1", "a seed is one number from 0 to 4294967295."),
        ("every 0.04s kill any rank", "the interval is below 0.05 s."),
        ("at 5s for 0s stop rank 1", "it lasts 0 seconds."),
        ("at 5s for 3s node 1 gone", "a killed rank does not come back by itself."),
        ("at kill rank 1", '"kill" is not a time.'),
        ("at", '"" is not a time.'),
        ("at 5s", "it does not say what happens."),
        ("at -5s kill rank 1", '"-5s" is not a time.'),
        ("at 5d kill rank 1", '"5d" is not a time.'),
        ("at 2592001s kill rank 1", '"2592001s" is not a time.'),
        ("at 721h kill rank 1", '"721h" is not a time.'),
        ("at 5s kill rank 1 now", '"now" is not understood.'),
        ("at 5s stop rank 1 for 3s", '"for 3s" is not understood.'),
        ("at 5s kill rank -1", "it names no rank."),
        ("at 5s kill rank", "it names no rank."),
        ("at 5s kill any node", "it names no rank."),
        ("at 5s node 1", "it names no node."),
        ("at 5s node x gone", "it names no node."),
        ("at 5s link down", "it names no link."),
        ("at 5s link 1 loss", "the loss is a share of packets, above 0% and below 100%."),
        ("at 5s link 1 loss 100%", "the loss is a share of packets, above 0% and below 100%."),
        ("at 5s link 1 down now", '"down now" is neither down, nor a rate, nor a loss.'),
        ("at 5s link 1 10mbit,5ms", "only the rate of a link can change."),
        ("at 5s link 1 model:10mbit", "only the rate of a link can change."),
        ("at 5s slow rank 1", "it does not say to how much of its CPU the rank is slowed, from 1% to 99%."),
        ("at 5s slow rank 1 to 0.9% cpu", "it does not say to how much of its CPU the rank is slowed, from 1% to 99%."),
        ("at 5s slow rank 1 to 100% cpu", "it does not say to how much of its CPU the rank is slowed, from 1% to 99%."),
        ("at 5s slow storage of rank 1 to 0.09MB/s", "it does not say to how many MB/s, from 0.1 MB/s."),
        ("at 5s disk", "a disk can only be full."),
        ("at 5s fry rank 1", '"fry" is not one of kill, stop, slow, link, disk, node.'),
        ("at 5s sow rank 1", '"sow" is not one of kill, stop, slow, link, disk, node. Did you mean "slow"?'),
    ],
)
def test_a_line_that_cannot_be_read_is_quoted_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_faults(text)
    assert caught.value.message == f'--faults "{text}": {message}'
    assert str(caught.value.hint).startswith("For example: ")


@pytest.mark.parametrize(
    "text",
    [
        "every 0.05s kill any rank",
        "at 2592000s kill rank 1",
        "at 720h kill rank 1",
        "at 5s slow rank 1 to 1% cpu",
        "at 5s slow rank 1 to 99.9% cpu",
        "at 5s slow storage of rank 1 to 0.1MB/s",
        "at 5s link 1 loss 0.0001%",
        "at 5s link 1 100kbit",
        "at 5s for 0.1s stop rank 1",
    ],
)
def test_lines_at_the_limits_are_read(text: str) -> None:
    assert len(parse_faults(text).items) == 1


def test_a_long_line_is_quoted_in_part() -> None:
    words = "at 5s kill rank 1 " + "x" * 100
    with pytest.raises(UsageError) as caught:
        parse_faults(words)
    assert caught.value.message.startswith(f'--faults "{words[:99]}…": ')
    exact = "at 5s kill rank 1 " + "x" * 82
    with pytest.raises(UsageError) as whole:
        parse_faults(exact)
    assert whole.value.message.startswith(f'--faults "{exact}": ')


def test_scripts_have_limits() -> None:
    one = "at 1s kill rank 0\n"
    assert len(parse_faults(one * MAX_ITEMS).items) == MAX_ITEMS
    with pytest.raises(UsageError, match="has more than 1000 faults"):
        parse_faults(one * (MAX_ITEMS + 1))
    padded = one + "#" * (MAX_TEXT - len(one))
    assert len(parse_faults(padded).items) == 1
    with pytest.raises(UsageError, match="longer than 64 KiB"):
        parse_faults(padded + "#")


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_word_without_blanks_is_the_name_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "faults.txt"
    path.write_text("at 1s kill rank 0  # first\nseed 3\n", "utf-8")
    assert read_faults(f" {path} ") == parse_faults("at 1s kill rank 0; seed 3")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"--faults: .*faults\.txt cannot be read: "):
        read_faults(str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        read_faults(str(tmp_path))
    with pytest.raises(NotFoundError, match="--faults: there is no file no-such-file") as caught:
        read_faults("no-such-file")
    assert "A script has blanks" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "  ", "anyway", " anyway ", "seed 3", "# nothing"])
def test_a_script_without_a_fault_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="the script holds no fault"):
        read_faults(text)


def test_a_long_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "faults.txt"
    path.write_text("at 1s kill rank 0\n" + "#" * MAX_TEXT)
    with pytest.raises(UsageError, match="longer than 64 KiB"):
        read_faults(str(path))


# --- what follows from a script ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ranks", "workers", "message"),
    [
        ("at 5s kill rank 4", 4, 2, "there is no rank 4; the run has 4, from 0 to 3."),
        ("at 5s link 2 down", 4, 2, "there is no link 2; the run has 2, from 0 to 1."),
        ("at 5s node 2 gone", 4, 2, "there is no node 2; the run has 2, from 0 to 1."),
        ("at 5s slow storage of rank 9 to 5MB/s", 4, 2, "there is no rank 9; the run has 4, from 0 to 3."),
    ],
)
def test_targets_beyond_the_run_are_refused(text: str, ranks: int, workers: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_faults(text).check(ranks, workers)
    assert caught.value.message == f'--faults "{text}": {message}'
    is_worker = "link" in text or "node" in text
    last, what = (workers - 1 if is_worker else ranks - 1), text.split()[2]
    assert caught.value.hint == (
        f"For example {what} {last}, or {what} any." if is_worker else f"For example rank {last}, or any rank."
    )


@pytest.mark.parametrize(
    "text", ["at 5s kill rank 3", "at 5s link 1 down", "at 5s node 1 gone", "at 5s kill any rank", "at 5s disk full"]
)
def test_targets_within_the_run_are_allowed(text: str) -> None:
    parse_faults(text).check(ranks=4, workers=2)


@pytest.mark.parametrize(
    ("text", "mtbf"),
    [
        ("at 5s kill rank 1", None),
        ("every 600s kill any rank", 600.0),
        ("every ~600s kill any rank; every 300s kill rank 0", 200.0),  # rates add: 1/600 + 1/300
        ("every ~600s kill any rank; at 5s kill rank 1", 600.0),
        ("every 60s for 5s stop any rank", None),  # it continues by itself
        ("every 60s stop any rank", 60.0),
        ("every 60s node any gone", 60.0),
        ("every 60s for 5s stop any rank; every 600s kill any rank", 600.0),
    ],
)
def test_the_mean_time_between_faults_counts_those_that_end_a_rank(text: str, mtbf: float | None) -> None:
    found = parse_faults(text).mtbf
    assert found == (None if mtbf is None else pytest.approx(mtbf))


def test_the_kinds_of_a_script() -> None:
    assert parse_faults("at 1s kill rank 0; at 2s kill rank 1; at 3s disk full").kinds == {KILL, DISK}
    assert [kind for kind in FaultKind if kind.targets_worker] == [LINK, NODE]
    assert [kind for kind in FaultKind if kind.lasts] == [STOP, SLOW, LINK, DISK, STORAGE]
    assert [*Policy] == ["fail", "restart", "replace", "shrink"]
    assert [*CheckpointCopy] == ["disk", "peer"]


def plan(text: str, count: int = 20, seed: int = 1, ranks: int = 8, workers: int = 2) -> list[Fault]:
    return [*itertools.islice(parse_faults(text).plan(seed, ranks, workers), count)]


def test_a_fixed_interval_repeats_exactly() -> None:
    assert [fault.at for fault in plan("every 2.5s kill rank 1", 4)] == [2.5, 5.0, 7.5, 10.0]


def test_faults_of_several_lines_are_merged_by_time_and_those_that_happen_once_end() -> None:
    found = plan("at 9s kill rank 3; every 4s stop rank 1; at 0s disk full", 5)
    assert [(fault.at, fault.kind, fault.target) for fault in found] == [
        (0.0, "disk", None),
        (4.0, "stop", 1),
        (8.0, "stop", 1),
        (9.0, "kill", 3),
        (12.0, "stop", 1),
    ]
    assert len(plan("at 9s kill rank 3; at 1s kill rank 0")) == 2


def test_a_fault_of_a_plan_has_what_its_line_says() -> None:
    script = (
        "at 1s for 2s slow rank 3 to 25% cpu; at 2s link 1 10mbit; at 3s link 1 loss 2%; "
        "at 4s slow storage of rank 2 to 5MB/s"
    )
    assert plan(script) == [
        Fault("slow", 1.0, 3, 2.0, 0.25, None),
        Fault("link", 2.0, 1, None, None, 1e7),
        Fault("link", 3.0, 1, None, 0.02, None),
        Fault("storage", 4.0, 2, None, None, 5e6),
    ]


@pytest.mark.parametrize(
    ("text", "count"), [("every 1s kill any rank", 8), ("every 1s link any down", 2), ("every 1s node any gone", 2)]
)
def test_any_is_one_of_the_ranks_or_of_the_workers(text: str, count: int) -> None:
    assert {fault.target for fault in plan(text, 200)} == set(range(count))


def test_lines_draw_independently_of_each_other() -> None:
    """A second line does not move the faults of the first one."""
    alone = plan("every ~10s kill any rank", 10)
    both = [fault for fault in plan("every ~10s kill any rank; every ~10s stop any rank", 60) if fault.kind == "kill"]
    assert both[:10] == alone
    second = [fault for fault in plan("every ~10s stop any rank; every ~10s kill any rank", 60) if fault.kind == "kill"]
    assert [fault.at for fault in second[:10]] != [fault.at for fault in alone]


def test_a_seed_of_the_script_counts_before_that_of_the_run() -> None:
    text = "every ~10s kill any rank"
    assert plan(f"{text}; seed 2", seed=1) == plan(text, seed=2) != plan(text, seed=1)
    assert plan(f"{text}; seed 0", seed=1) == plan(text, seed=0)


def test_times_of_a_plan_are_milliseconds() -> None:
    moments = [fault.at for fault in plan("every ~10s kill any rank", 50)]
    assert moments == [round(moment, 3) for moment in moments] == sorted(moments)
    assert len(set(moments)) == 50


def test_the_plan_of_a_seed_never_changes() -> None:
    """Archives are verified with it: a run of an older version must give the same plan."""
    found = plan("every ~10s kill any rank; every ~5s link any down", 6, seed=42)
    assert [(fault.at, fault.kind, fault.target) for fault in found] == [
        (3.103, "kill", 6),
        (4.198, "kill", 3),
        (11.31, "link", 0),
        (12.903, "kill", 1),
        (17.439, "kill", 0),
        (18.312, "kill", 6),
    ]


@pytest.mark.parametrize(
    ("fault", "document", "words"),
    [
        (Fault("kill", 5.0, 3), {"kind": "kill", "at": 5.0, "target": 3}, "kill rank 3"),
        (
            Fault("link", 5.0, 2, 20.0, None, 0.0),
            {"kind": "link", "at": 5.0, "target": 2, "seconds": 20.0, "rate": 0.0},
            "link 2 down for 20 s",
        ),
        (Fault("link", 5.0, 2, rate=1e7), {"kind": "link", "at": 5.0, "target": 2, "rate": 1e7}, "link 2 10mbit"),
        (
            Fault("link", 5.0, 0, share=0.02),
            {"kind": "link", "at": 5.0, "target": 0, "share": 0.02},
            "link 0 loss 2%",
        ),
        (
            Fault("slow", 0.0, 1, 2.5, 0.25),
            {"kind": "slow", "at": 0.0, "target": 1, "seconds": 2.5, "share": 0.25},
            "slow rank 1 to 25% cpu for 2.5 s",
        ),
        (Fault("stop", 5.0, 0, 2.0), {"kind": "stop", "at": 5.0, "target": 0, "seconds": 2.0}, "stop rank 0 for 2 s"),
        (Fault("disk", 5.0), {"kind": "disk", "at": 5.0}, "disk full"),
        (
            Fault("storage", 5.0, 1, rate=2.5e6),
            {"kind": "storage", "at": 5.0, "target": 1, "rate": 2.5e6},
            "slow storage of rank 1 to 2.5MB/s",
        ),
        (Fault("node", 5.0, 1), {"kind": "node", "at": 5.0, "target": 1}, "node 1 gone"),
    ],
)
def test_a_fault_in_a_document_and_in_words(fault: Fault, document: dict[str, Any], words: str) -> None:
    assert fault.to_dict() == document
    assert str(fault) == words


def spec(**changes: Any) -> RunSpec:
    return RunSpec("x-2", "c", "local", "t", "p", ("true",), "gloo", 2, **{"processes_per_worker": 4, **changes})


def test_the_plan_of_a_run_has_its_seed_and_its_size() -> None:
    text = "every ~10s kill any rank; every ~10s node any gone"
    found = [*itertools.islice(plan_of(spec(faults=text, seed=7)), 100)]
    assert found == plan(text, 100, seed=7, ranks=8, workers=2)
    assert max(fault.target or 0 for fault in found if fault.kind == "kill") == 7
    assert max(fault.target or 0 for fault in found if fault.kind == "node") == 1
    assert list(plan_of(spec())) == []


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "mtbf", "interval"),
    [
        # Daly, FGCS 22 (2006), eq. 37: sqrt(2dM) [1 + 1/3 (d/2M)^(1/2) + 1/9 (d/2M)] - d for d < 2M, else M.
        (2.0, 100.0, 20 * (1 + 0.1 / 3 + 0.01 / 9) - 2),
        (50.0, 100.0, 100 * (1 + 0.5 / 3 + 0.25 / 9) - 50),
        (0.0, 100.0, 0.0),
        (200.0, 100.0, 100.0),
        (201.0, 100.0, 100.0),
    ],
)
def test_the_best_interval_is_dalys(cost: float, mtbf: float, interval: float) -> None:
    assert best_interval(cost, mtbf) == pytest.approx(interval)


def test_the_best_interval_is_best_by_simulation() -> None:
    """Lost time for exponential faults: (M/t) (e^((t+d)/M) - 1) per useful second (Daly, eq. 20, without restarts)."""
    cost, mtbf = 5.0, 600.0

    def slowdown(interval: float) -> float:
        return mtbf / interval * (math.exp((interval + cost) / mtbf) - 1)

    best = best_interval(cost, mtbf)
    assert slowdown(best) < min(slowdown(1.1 * best), slowdown(0.9 * best))


@pytest.mark.parametrize(
    ("mtbf", "cost", "interval", "restart", "share"),
    [
        (100.0, 0.0, 20.0, 0.0, 0.9),  # half an interval is lost per fault
        (100.0, 0.0, 20.0, 10.0, 0.8),
        (100.0, 5.0, 20.0, 10.0, 0.64),  # and a quarter more time goes into checkpoints
        (100.0, 0.0, 200.0, 0.0, 0.0),
        (100.0, 0.0, 20.0, 500.0, 0.0),
    ],
)
def test_the_expected_share_of_productive_time(
    mtbf: float, cost: float, interval: float, restart: float, share: float
) -> None:
    assert expected_ettr(mtbf, cost, interval, restart) == pytest.approx(share)


@pytest.mark.parametrize(
    ("mtbf", "until", "attempts"), [(100.0, 0.0, 1.0), (100.0, 100.0, math.e), (1.0, 50.0, math.exp(50))]
)
def test_the_attempts_until_one_survives(mtbf: float, until: float, attempts: float) -> None:
    assert expected_attempts(mtbf, until) == pytest.approx(attempts)


def test_hopeless_runs_have_a_finite_number_of_attempts() -> None:
    assert expected_attempts(1.0, 1e9) == math.exp(50)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", (None, 1)),
        ("999999999", (None, 999_999_999)),
        ("1s", (1.0, None)),
        ("0.5s", (0.5, None)),
        ("1.5h", (5400.0, None)),
        ("0.001s", (0.001, None)),
        ("9999999s", (9_999_999.0, None)),
    ],
)
def test_checkpoints_every_so_many_updates_or_seconds(text: str, value: tuple[float | None, int | None]) -> None:
    assert parse_every(text) == value


@pytest.mark.parametrize("text", ["", "0", "000", "1000000000", "٣", "0.0s", "0.0001s", "10000000s", "s", "1 s", "5d"])
def test_other_intervals_of_checkpoints_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_every(text)
    assert caught.value.message == f'--checkpoint-every "{text}" is neither a time nor a number of updates.'


def test_a_long_interval_is_quoted_in_part() -> None:
    with pytest.raises(UsageError) as caught:
        parse_every("x" * 41)
    assert f'"{"x" * 40}"' in caught.value.message
