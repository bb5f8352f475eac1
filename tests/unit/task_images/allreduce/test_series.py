"""Which series are measured in which order, collectives of other frameworks, and verdicts at their bounds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from task_images.allreduce import framework_operations, task
from task_images.allreduce.measure import Row, Series
from task_images.allreduce.operations import COLLECTIVES, DTYPES, IN_PLACE, OUT_OF_PLACE, Buffers
from task_images.allreduce.pairs import judge_pairs, make_rounds
from task_images.allreduce.settings import Settings
from task_images.allreduce.sizes import from_bytes, grid, in_parts
from task_images.harness.errors import TaskUsageError
from tests.unit.task_images.harness.test_images import one_of

# --- series ---------------------------------------------------------------------------------------------------------


def measure(
    monkeypatch: pytest.MonkeyPatch, refusals: dict[str, str], **settings: Any
) -> tuple[list[Any], dict[str, str], list[tuple[str, int]]]:
    """The measured series, the refused ones, and every size in the order in which it was measured."""
    order: list[tuple[str, int]] = []
    steps: list[Any] = []

    def next_size(world: Any, tracker: Any, report: Any, given: Settings, one: Any, buffers: Buffers) -> None:
        elements = one.elements[len(one.rows)]
        assert buffers.dtype is DTYPES[one.series.dtype]
        if len(one.rows) == 1 and one.series.collective == "broadcast":
            one.why = "stopped"
            return
        order.append((str(one.series), elements))
        moved = elements * buffers.element_size
        names = one.series.collective, one.series.dtype, one.series.place
        one.rows.append(Row(*names, moved, elements, 3, 1.0, 2.0, 10.0 + moved / 1000))

    monkeypatch.setattr(task, "_refusal", lambda world, tracker, series: refusals.get(series.collective, ""))
    monkeypatch.setattr(task, "_next_size", next_size)
    report: Any = SimpleNamespace(step=lambda *words, **more: steps.append((*words, more["series"])))
    world: Any = one_of(0, 4)
    tracker: Any = None
    measured, refused = task._all(world, tracker, report, Settings(**settings))
    assert [step[:2] for step in steps] == sorted(step[:2] for step in steps)
    return measured, {str(series): why for series, why in refused.items()}, order


def test_each_size_is_measured_for_all_series_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, order = measure(
        monkeypatch, {}, collectives=["all_gather", "all_reduce"], dtypes=["fp16", "fp32"], sizes=[64, 4096]
    )
    names = [
        "all_reduce, fp32, in place", "all_reduce, fp16, in place",
        "all_gather, fp32, in place", "all_gather, fp16, in place",
    ]  # fmt: skip
    assert order == [
        *zip(names, (16, 32, 16, 32), strict=True),
        *zip(names, (1024, 2048, 1024, 2048), strict=True),
    ]


def test_places_that_a_collective_does_not_have_are_replaced_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, _, _ = measure(
        monkeypatch, {}, collectives=["all_to_all", "broadcast"], dtypes=["fp32"], places=["out_of_place", "in_place"],
        sizes=[64],
    )  # fmt: skip
    assert [str(one.series) for one in measured] == [
        "broadcast, fp32, in place", "broadcast, fp32, out of place", "all_to_all, fp32, out of place",
    ]  # fmt: skip
    alone, _, _ = measure(monkeypatch, {}, collectives=["all_to_all"], dtypes=["fp32"], places=["in_place"], sizes=[64])
    assert [one.series.place for one in alone] == [OUT_OF_PLACE]


def test_a_series_that_ended_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, _, order = measure(
        monkeypatch, {}, collectives=["all_reduce", "broadcast"], dtypes=["fp32"], sizes=[4, 40, 400]
    )
    ended = measured[1]
    assert (ended.why, len(ended.rows), ended.left_out) == ("stopped", 1, [40, 400])
    assert [elements for name, elements in order if name.startswith("all_reduce")] == [1, 10, 100]
    # Three sizes make a line of 10 us and 1000 bytes per us; one does not.
    assert measured[0].fit.alpha_us == pytest.approx(10)
    assert measured[0].fit.busbw == pytest.approx(1.0 * 1.5)
    assert ended.fit is None


def test_what_a_backend_lacks_is_left_out_and_nothing_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, refused, _ = measure(
        monkeypatch, {"ring": "no"}, collectives=["ring", "all_reduce"], dtypes=["fp32"], sizes=[4]
    )
    assert [one.series for one in measured] == [Series("all_reduce", "fp32", IN_PLACE)]
    assert refused == {"ring, fp32, out of place": "no"}
    with pytest.raises(TaskUsageError, match=r"supports none of the requested measurements; ring, fp32, .*: no"):
        measure(monkeypatch, {"ring": "no"}, collectives=["ring"], dtypes=["fp32"], sizes=[4])


# --- other frameworks -----------------------------------------------------------------------------------------------


class Framework:
    """A framework whose arrays are tensors, and whose collectives add 1."""

    title, collectives, in_place = "Frame", ("all_reduce", "all_gather"), ("all_reduce",)

    def __init__(self) -> None:
        self.donated: list[bool] = []

    def collective(self, name: str, donate: bool) -> Any:
        self.donated.append(donate)
        return lambda array: array + 1

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def get(self, array: torch.Tensor) -> torch.Tensor:
        return array


@pytest.mark.parametrize("place", [IN_PLACE, OUT_OF_PLACE])
def test_in_place_the_result_is_sent_next(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    framework = Framework()
    monkeypatch.setattr(framework_operations, "open_framework", lambda world: framework)
    seen: list[list[float]] = []
    content = SimpleNamespace(
        sent=2, fill=lambda host: host.fill_(5.0), wrong=lambda array: seen.append(array.tolist())
    )
    monkeypatch.setattr(framework_operations, "describe", lambda *_: content)
    call = framework_operations.make("all_reduce", Buffers.of(one_of(0, 1), "fp32"), 2, place)
    call.fill()
    call.call()
    call.call()
    call.wrong()
    assert seen == [[7.0, 7.0] if place == IN_PLACE else [6.0, 6.0]]
    assert framework.donated == [place == IN_PLACE]
    call.fill()
    call.call()
    call.wrong()
    assert seen[1] == [6.0, 6.0]  # filled anew
    assert [buffer.tolist() for buffer in call.buffers] == [[5.0, 5.0]]


@pytest.mark.parametrize(
    ("collective", "place", "words"),
    [
        ("broadcast", OUT_OF_PLACE, "Frame does not support it, or it is not measured"),
        ("all_gather", IN_PLACE, "Frame supports it only out of place: --set places=out_of_place"),
    ],
)
def test_what_a_framework_lacks_is_said(
    collective: str, place: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framework_operations, "open_framework", lambda world: Framework())
    with pytest.raises(NotImplementedError) as caught:
        framework_operations.make(collective, Buffers.of(one_of(0, 1), "fp32"), 4, place)
    assert str(caught.value) == words


# --- verdicts -------------------------------------------------------------------------------------------------------


def judge(ranks: int, **slow: float) -> Any:
    """All pairs take a second but for those given, as p02=3.0 for the pair of 0 and 2."""
    seconds = {pair: slow.get(f"p{pair[0]}{pair[1]}", 1.0) for each in make_rounds(ranks) for pair in each}
    return judge_pairs(seconds, ranks)


@pytest.mark.parametrize(
    ("ranks", "slow", "kind", "named", "reason"),
    [
        (5, {"p02": 1.5}, "none", (), "no pair takes more than 1.5 times the usual time"),
        (5, {"p02": 1.501}, "link", (0, 2), "only the pair of 0 and 2 is slow"),
        (
            5, {"p02": 2.0, "p12": 2.0, "p23": 2.0, "p24": 2.0},
            "node", (2,), "all pairs of rank 2 are slow, and no others",
        ),
        (5, {"p02": 2.0, "p12": 2.0, "p23": 2.0}, "several", (2,), "3 of 10 pairs are slow"),
        (5, {"p01": 2.0, "p23": 2.0}, "several", (0, 2), "2 of 10 pairs are slow"),
        (3, {"p02": 2.0, "p12": 2.0}, "node", (2,), "all pairs of rank 2 are slow, and no others"),
        (4, {"p03": 2.0, "p13": 2.0, "p23": 2.0}, "node", (3,), "all pairs of rank 3 are slow, and no others"),
        (3, {"p02": 2.0}, "link", (0, 2), "only the pair of 0 and 2 is slow"),
    ],
)  # fmt: skip
def test_verdicts(ranks: int, slow: dict[str, float], kind: str, named: tuple[int, ...], reason: str) -> None:
    found = judge(ranks, **slow)
    assert (found.kind, found.ranks, found.reason) == (kind, named, reason)
    assert found.to_dict() == {
        "kind": kind,
        "ranks": list(named),
        "slow": sorted([int(name[1]), int(name[2])] for name, value in slow.items() if value > 1.5),
    }


def test_too_few_pairs_have_no_verdict() -> None:
    assert judge(2).reason == "2 ranks have too few pairs to compare"
    assert judge_pairs({(0, 1): 1.0, (1, 2): 1.0}, 3).kind == "cannot_tell"
    assert judge(3).kind == "none"


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_sizes_are_sorted_and_not_below_one_element() -> None:
    assert grid(1, 1, 3) == [10]
    assert grid(1, 1, 3, duplicates=True) == [10, 10, 10]
    assert grid(0, 2, 2) == [1, 100]
    assert from_bytes([9, 3, 8, 16], 8) == [1, 2]
    assert in_parts([10, 9, 1, 8], 4) == [4, 8]
    assert in_parts([5], 1) == [5]


@pytest.mark.parametrize("name", [name for name, kind in COLLECTIVES.items() if kind.divided])
def test_what_is_divided_has_whole_parts(name: str) -> None:
    buffers: Any = SimpleNamespace(element_size=4)
    found = task._elements(Settings(sizes=[4, 100, 1000]), Series(name, "fp32", OUT_OF_PLACE), buffers, 4)
    assert found == [4, 24, 248]
