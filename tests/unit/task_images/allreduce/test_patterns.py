"""Who exchanges what with whom, what arrives, how the search goes on until it is certain, and the printed tables."""

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from task_images.allreduce import operations, search, table
from task_images.allreduce.fit import fit
from task_images.allreduce.measure import ISOLATED, Row, Series
from task_images.allreduce.operations import (
    COLLECTIVES,
    IN_PLACE,
    OUT_OF_PLACE,
    Buffers,
    _partner,
    describe,
)


def make_world(rank: int, size: int) -> Any:
    contract = SimpleNamespace(hosts=[], local_world_size=1)
    return SimpleNamespace(
        rank=rank, size=size, device=torch.device("cpu"), backend="gloo", contract=contract,
        barrier=lambda: None, synchronize=lambda: None,
    )  # fmt: skip


def make(name: str, rank: int, size: int, elements: int = 12, place: str = OUT_OF_PLACE) -> Any:
    return COLLECTIVES[name].make(Buffers.of(make_world(rank, size), "fp32"), elements, place)


@pytest.mark.parametrize(
    ("size", "partners"),
    [
        (1, [(None, False)]),
        (2, [(1, True), (0, False)]),
        (4, [(2, True), (3, True), (0, False), (1, False)]),
        (5, [(2, True), (3, True), (0, False), (1, False), (None, False)]),
    ],
)
def test_partners_are_half_of_the_ranks_apart(size: int, partners: list[Any]) -> None:
    assert [_partner(make_world(rank, size)) for rank in range(size)] == partners


class Sent:
    """What ranks post, instead of sending it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.posted: dict[int, list[Any]] = {}
        self.rank = 0
        monkeypatch.setattr(dist, "P2POp", self.post)

    def post(self, kind: Any, tensor: torch.Tensor, peer: int) -> Any:
        self.posted.setdefault(self.rank, []).append(("send" if kind is dist.isend else "receive", tensor, peer))
        return kind

    def make(self, name: str, size: int) -> list[Any]:
        calls = []
        for self.rank in range(size):
            calls.append(make(name, self.rank, size))
        return calls

    def deliver(self) -> None:
        """Move what was posted, message by message."""
        for rank, messages in self.posted.items():
            for kind, tensor, peer in messages:
                if kind == "receive":
                    [source] = [one for what, one, to in self.posted[peer] if what == "send" and to == rank]
                    tensor.copy_(source)


@pytest.mark.parametrize("name", ["ring", "permutation", "bidirectional", "incast"])
@pytest.mark.parametrize("size", [2, 4, 5])
def test_every_message_has_a_receiver_and_arrives_as_expected(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(monkeypatch)
    calls = sent.make(name, size)
    for call in calls:
        call.fill()
    wrong = [call.wrong() for call in calls]
    idle = [rank for rank in range(size) if rank not in sent.posted]
    assert idle == ([4] if name == "bidirectional" and size == 5 else [])
    for rank, count in enumerate(wrong):  # before anything has moved
        receives = any(kind == "receive" for kind, _, _ in sent.posted.get(rank, []))
        assert (count > 0) is receives
    sent.deliver()
    assert [call.wrong() for call in calls] == [0] * size
    assert [call.counts for call in calls] == [rank not in idle for rank in range(size)]
    sizes = {tensor.numel() for messages in sent.posted.values() for _, tensor, _ in messages}
    assert sizes == {12 // size if name == "incast" else 12}


@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_a_permutation_is_one_cycle_through_all_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    sent.make("permutation", size)
    targets = {rank: next(peer for kind, _, peer in posted if kind == "send") for rank, posted in sent.posted.items()}
    seen, rank = [], 0
    for _ in range(size):
        seen.append(rank)
        rank = targets[rank]
    assert rank == 0
    assert sorted(seen) == list(range(size))
    if size == 33:
        assert any(targets[rank] != (rank + 1) % size for rank in range(size))


def test_one_side_of_a_ping_pong_keeps_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []
    monkeypatch.setattr(dist, "send", lambda tensor, peer: steps.append(("send", peer)))
    monkeypatch.setattr(dist, "recv", lambda tensor, peer: steps.append(("receive", peer)))
    first, second, odd = (make("ping_pong", rank, 3) for rank in range(3))
    first.call()
    assert steps == [("send", 1), ("receive", 1)]
    steps.clear()
    second.call()
    assert steps == [("receive", 0), ("send", 0)]
    odd.call()
    odd.fill()
    assert (first.counts, second.counts, odd.counts, odd.wrong()) == (True, False, False, 0)
    assert (first.trips, second.trips) == (2, 2)


@pytest.mark.parametrize(
    ("name", "sent", "received"),
    [("all_reduce", 12, 12), ("reduce_scatter", 12, 4), ("all_gather", 4, 12), ("all_to_all", 12, 12)],
)
def test_what_a_rank_sends_and_gets(name: str, sent: int, received: int) -> None:
    """Of three ranks, whose results are put together here by hand."""
    contents = [describe(name, Buffers.of(make_world(rank, 3), "fp32"), 12) for rank in range(3)]
    assert {(content.sent, content.received) for content in contents} == {(sent, received)}
    inputs = [torch.zeros(sent) for _ in range(3)]
    for content, tensor in zip(contents, inputs, strict=True):
        content.fill(tensor)
    total = torch.stack(inputs).sum(0)
    for rank, content in enumerate(contents):
        result = {
            "all_reduce": total,
            "reduce_scatter": total[4 * rank : 4 * rank + 4],
            "all_gather": torch.cat(inputs),
            "all_to_all": torch.cat([one[4 * rank : 4 * rank + 4] for one in inputs]) if sent == 12 else total,
        }[name].clone()
        assert content.wrong(result) == 0
        result[1] += 1
        assert content.wrong(result) == 1
        assert content.wrong(torch.full((received,), -1.0)) == received


@pytest.mark.parametrize("place", [IN_PLACE, OUT_OF_PLACE])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"])
def test_in_place_the_smaller_side_is_a_part_of_the_larger(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        call = make(name, rank, 3, place=place)
        call.fill()
        storages = {buffer.untyped_storage().data_ptr() for buffer in call.buffers}
        assert len(storages) == (1 if place == IN_PLACE else 2)
        if name in ("all_gather", "reduce_scatter"):
            send, result = call.buffers
            small, large = (send, result) if name == "all_gather" else (result, send)
            assert (small.numel(), large.numel()) == (4, 12)
            if place == IN_PLACE:
                assert small.storage_offset() == 4 * rank
        is_root = rank == 0
        if name == "broadcast":
            assert (call.wrong() == 0) is is_root
        elif name == "reduce":
            assert (call.wrong() > 0) is is_root
        else:
            assert call.wrong() > 0


# --- the search -----------------------------------------------------------------------------------------------------


def find(
    monkeypatch: pytest.MonkeyPatch, passes: list[dict[tuple[int, int], float]], hosts: list[str]
) -> tuple[Any, str]:
    left, said = iter(passes), []  # type: tuple[Any, list[str]]
    monkeypatch.setattr(search, "_measure_rounds", lambda *_: dict(next(left)))
    world = make_world(0, 6)
    world.contract.hosts, world.contract.local_world_size = hosts, 6 // max(1, len(hosts))
    report: Any = SimpleNamespace(say=said.append)
    found = search.search(world, None, report, 1000)  # type: ignore[arg-type]
    return found, said[0]


PAIRS = [(a, b) for a in range(6) for b in range(a + 1, 6)]
GOOD = dict.fromkeys(PAIRS, 1.0)
SLOW = {pair: 9.0 if 4 in pair else 1.0 for pair in PAIRS}


def test_equal_pairs_need_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = find(monkeypatch, [GOOD], [])
    assert said == "pairs of ranks: none: no pair takes more than 1.5 times the usual time"
    assert found == {
        "bytes": 1000,
        "rounds": 5,
        "passes": 1,
        "seconds": {f"{a}-{b}": 1.0 for a, b in PAIRS},
        "verdict": {"kind": "none", "ranks": [], "slow": []},
        "reason": "no pair takes more than 1.5 times the usual time",
        "hosts": [],
    }


def test_a_busy_moment_is_measured_again_and_the_least_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = find(monkeypatch, [SLOW, {**GOOD, (0, 1): 5.0}], [])
    assert (found["verdict"]["kind"], found["passes"]) == ("none", 2)
    assert found["seconds"]["0-4"] == 1.0


def test_a_slow_node_is_named_with_its_host_once_it_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = find(monkeypatch, [SLOW] * 12, ["a", "b", "c"])
    assert found["verdict"]["kind"] == "node"
    assert found["hosts"] == ["a", "a", "b", "b", "c", "c"]
    assert said == "pairs of ranks: node: rank 4 on c"
    # Ten good pairs, never busy in n passes: 15 (1 / (10 n + 2))^n is below a thousandth from n = 4 on.
    assert found["passes"] == next(n for n in range(1, 9) if 15 * (1 / (10 * n + 2)) ** n <= 0.001)


def test_what_never_becomes_certain_is_given_up_after_twelve_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "is_certain", lambda *_: False)
    found, said = find(monkeypatch, [SLOW] * 12, ["a"] * 5)
    assert (found["verdict"]["kind"], found["passes"], found["hosts"]) == ("cannot_tell", 12, [])
    assert said == "pairs of ranks: cannot tell: too many pairs are slow only in some of 12 passes"
    assert len(found["verdict"]["slow"]) == 5


def test_the_time_of_a_pair_is_the_slower_side_without_the_first_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks: rank 0 is idle once. The first exchange takes 100 seconds, the others 5, 4, 3, 2 and 1."""
    now, number, met = [0.0], [0], []

    def exchange(messages: Any) -> None:
        now[0] += [100.0, 5.0, 4.0, 3.0, 2.0, 1.0][number[0] % 6]
        number[0] += 1
        met.append(messages[0])

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(search, "exchange_messages", exchange)
    monkeypatch.setattr(dist, "P2POp", lambda kind, tensor, peer: (peer, tensor.numel()))
    world = make_world(0, 3)
    world.gather = lambda values: [values, [7.0], [0.5]]
    tracker: Any = SimpleNamespace(section=lambda name: nullcontext())
    found = search._measure_rounds(world, tracker, 64)
    assert found == {(0, 1): 7.0, (0, 2): 1.0, (1, 2): 7.0}
    assert {peer for peer, _ in met} == {1, 2}
    assert {size for _, size in met} == {64}


# --- tables ---------------------------------------------------------------------------------------------------------

SERIES = Series("all_reduce", "fp32", IN_PLACE)


def test_a_line_has_the_figures_under_their_titles() -> None:
    row = Row("all_reduce", "fp32", IN_PLACE, 4096, 1024, 50, 10.04, 12.0, 11.0, 13.0, None, 20.0, 0.000372, 1.5)
    row_of_ranks = replace(row, rank_p50_min_us=9.5, rank_p50_max_us=11.25)
    titles, first, second = table.header(SERIES, 4, ISOLATED), table.line(row), table.line(row_of_ranks)
    _, about, columns = titles.split("\n")
    assert about == "all_reduce, fp32, in place, isolated, k = 4: S = the buffer; busbw = algbw * 2 (k - 1) / k"
    assert len(columns) == len(first) == len(second)
    assert first.split() == ["4096", "1024", "10.0", "12.0", "11.0", "13.0", "-", "20.0", "-", "3.7e-04", "1.5", "50"]
    assert second.split()[8] == "9.5-11.2"
    assert columns.split("  ")[-1].strip() == "samples"


def test_a_fit_is_described_with_latency_and_rate_of_a_link() -> None:
    sizes = [1000 * 2**power for power in range(12)]
    found = fit(sizes, [60 + size / 2000 for size in sizes], 1.5)
    assert table.describe_fit(SERIES, None, 4) == "no fit: it needs at least three sizes"
    text = table.describe_fit(SERIES, found, 4)
    assert text.startswith("fit t = alpha + S * beta: alpha 60 ± ")
    assert ", 1 / beta 2 ± " in text
    # The ring of four ranks has six times the latency of one message: 2 (k - 1).
    assert text.endswith(": a 10 us, 1 / b 3 GB/s")
    assert table.describe_fit(SERIES, found, 1).count("\n") == 0
    assert found is not None
    flat = replace(found, algbw=None, busbw=None)
    assert table.describe_fit(SERIES, flat, 4).endswith(": a 10 us, b too small to tell")


def test_sizes_stop_at_gibibytes() -> None:
    assert [table.size(2**power) for power in (9, 10, 20, 30, 41)] == ["512 B", "1 KiB", "1 MiB", "1 GiB", "2048 GiB"]


def test_messages_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    works = [SimpleNamespace(wait=lambda number=number: waited.append(number)) for number in range(3)]
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda messages: works)
    operations.exchange_messages([])
    assert waited == [0, 1, 2]
