"""Calibration with a clock that the test moves: what is timed, when it stops, and what it leaves unchanged."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from task_images.harness import calibration
from task_images.harness.calibration import (
    BESIDE_BYTES,
    FILE,
    MAX_BESIDE,
    PAIRS,
    SAMPLES,
    SIZES,
    STEPS,
    CollectiveTimes,
    add_buckets,
    calibrate,
    keep_state,
)
from tests.fakes.clock import Clock


class Ranks:
    """Two ranks, of which this is one: the other takes `factor` times as long, and the clock says `agreed`."""

    size, rank, is_first, backend, threads = 2, 0, True, "gloo", 1
    device = torch.device("cpu")

    def __init__(self, folder: Path, factor: float = 1.0, agreed: float | None = None) -> None:
        self.contract = SimpleNamespace(output_dir=str(folder))
        self.factor, self.agreed = factor, agreed

    def barrier(self) -> None: ...
    def synchronize(self) -> None: ...

    def agree(self, value: float) -> float:
        return value if self.agreed is None else self.agreed

    def max(self, values: Sequence[float]) -> list[float]:
        return [self.factor * value for value in values]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(calibration, "time", made)
    return made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[int]:
    """The bytes of each all-reduce, of which the n-th takes n milliseconds."""
    made: list[int] = []

    def all_reduce(tensor: Tensor, async_op: bool = False) -> None:
        made.append(tensor.numel() * tensor.element_size())
        clock.now += 0.001 * len(made)
        tensor[:1] *= 2

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return made


def world(folder: Path, **changes: Any) -> Any:
    return Ranks(folder, **changes)


# --- collectives ----------------------------------------------------------------------------------------------------


def test_nine_all_reduces_of_a_size_are_timed_after_two_to_warm_up(tmp_path: Path, sent: list[int]) -> None:
    found = calibration._measure(world(tmp_path, factor=10.0), 4096)
    assert sent == [4096] * (SAMPLES + 2)
    assert (found["operation"], found["bytes"], found["samples"]) == ("all_reduce", 4096, 9)
    slowest = 10 * 0.001 * np.arange(3, 12)
    expected = np.quantile(slowest, [0.1, 0.5, 0.9], method="nearest")
    assert [found["p10"], found["p50"], found["p90"]] == pytest.approx(expected)


def test_a_size_that_takes_too_long_stops_after_three_samples(tmp_path: Path, sent: list[int]) -> None:
    """All ranks stop after the same message, by rank 0's clock: otherwise some would wait for ever."""
    assert calibration._measure(world(tmp_path, agreed=2.01), 4096)["samples"] == 3
    assert len(sent) == 5


def test_two_seconds_are_not_too_long(tmp_path: Path, sent: list[int]) -> None:
    assert calibration._measure(world(tmp_path, agreed=2.0), 4096)["samples"] == SAMPLES


def test_sizes_include_that_of_the_messages_beside_computation() -> None:
    assert BESIDE_BYTES in SIZES
    assert list(SIZES) == sorted(set(SIZES))


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_training", [True, False])
def test_the_model_and_random_numbers_are_as_before(is_training: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train(is_training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with keep_state(model, torch.device("cpu")):
        model.train()
        model(torch.rand(4, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert torch.equal(torch.rand(3), expected)
    assert model.training is is_training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert before["1.num_batches_tracked"] == 0


# --- steps ----------------------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """One layer is used, one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.unused = nn.Linear(5, 4)
        self.frozen = nn.Parameter(torch.zeros(7), requires_grad=False)


def test_a_step_times_each_phase_without_the_loading(tmp_path: Path, clock: Clock) -> None:
    model = TwoLayers().eval()

    def take() -> Callable[[], Tensor]:
        clock.now += 16.0

        def loss() -> Tensor:
            clock.now += 4.0
            assert model.training
            outputs: Tensor = model.used(torch.ones(1, 3, dtype=torch.bfloat16))
            return outputs.sum()

        return loss

    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def note_update(*_: object) -> None:
        clock.now += 1.0

    optimizer.register_step_post_hook(note_update)
    steps = calibration._Steps(world(tmp_path), model, optimizer, take)

    def delay(_: Tensor) -> None:
        clock.now += 2.0

    model.used.bias.register_post_accumulate_grad_hook(delay)  # type: ignore[no-untyped-call]
    found = steps.take(lambda: setattr(clock, "now", clock.now + 32.0))
    assert found == {"data": 16.0, "forward": 4.0, "backward": 6.0, "optimizer": 1.0, "step": 7.0}
    assert steps.sizes == {"used.weight": 12, "used.bias": 4, "unused.weight": 80, "unused.bias": 16}
    assert steps.rows == {"used.weight": 2, "used.bias": 1, "unused.weight": 4, "unused.bias": 1}
    assert steps.ready[0]["unused.weight"] == 6.0  # at the end of the backward pass
    assert steps.ready[0]["used.bias"] == 4.0
    steps.close()
    steps._row = {}
    model.used(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert steps._row == {}


# --- computation beside messages ------------------------------------------------------------------------------------


class Steps:
    """Backward passes of one second, and two while messages are in flight."""

    def __init__(self) -> None:
        self.taken: list[bool] = []

    def take(self, before: Callable[[], object] | None = None) -> dict[str, float]:
        self.taken.append(before is not None)
        if before is not None:
            before()
        return {"backward": 2.0 if before else 1.0}


def times(seconds: float) -> list[CollectiveTimes]:
    return [
        {"operation": "all_reduce", "bytes": size, "samples": 1, "p10": each, "p50": each, "p90": each}
        for size, each in ((4096, 100.0), (BESIDE_BYTES, seconds))
    ]


def overlap(ranks: Any, steps: Steps, collectives: Sequence[CollectiveTimes]) -> Any:
    made: Any = steps
    return calibration._measure_overlap(ranks, made, collectives)


def test_steps_alternate_without_and_with_messages_for_the_whole_backward_pass(tmp_path: Path, sent: list[int]) -> None:
    """Two messages are in flight at a time, so eight of 0.25 s fill a second."""
    steps = Steps()
    found = overlap(world(tmp_path, factor=1.0), steps, times(0.25))
    assert found == {"alone": 1.0, "beside": 2.0, "communicated": 1.0}
    assert steps.taken == [False] * 3 + [False, True] * PAIRS
    assert sent == [BESIDE_BYTES] * (8 * PAIRS)


def test_at_most_32_messages_are_sent_per_step(tmp_path: Path, sent: list[int]) -> None:
    found = overlap(world(tmp_path), Steps(), times(0.02))  # 100 would fill the pass
    assert len(sent) == MAX_BESIDE * PAIRS
    assert found["communicated"] == pytest.approx(32 * 0.02 / 2)


def test_messages_in_flight_for_little_of_the_pass_tell_nothing(tmp_path: Path, sent: list[int]) -> None:
    steps = Steps()
    assert overlap(world(tmp_path), steps, times(0.0124)) is None  # 32 take 0.198 s, less than a fifth
    assert steps.taken == [False] * 3
    assert overlap(world(tmp_path), Steps(), times(0.0126)) is not None


def test_communication_does_not_outlast_the_slowed_pass(tmp_path: Path, sent: list[int]) -> None:
    found = overlap(world(tmp_path), Steps(), times(9.0))
    assert found["communicated"] == found["beside"] == 2.0
    assert len(sent) == PAIRS  # at least one message


@pytest.mark.parametrize("backend", ["mpi", "ucc", "none"])
def test_backends_that_do_not_communicate_during_computation_are_not_measured(tmp_path: Path, backend: str) -> None:
    steps, ranks = Steps(), world(tmp_path)
    ranks.backend = backend
    assert overlap(ranks, steps, times(0.25)) is None
    assert steps.taken == []


def test_one_rank_has_no_messages(tmp_path: Path) -> None:
    assert overlap(world(tmp_path), Steps(), []) is None


# --- the document ---------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One rank; methods that compress are not timed here."""
    monkeypatch.setattr(calibration, "measure_codecs", lambda world, shapes: [])
    made = world(tmp_path)
    made.size, made.backend = 1, "none"
    return made


def fill(alone: Any) -> tuple[nn.Module, list[int]]:
    model, loaded = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), []

    def take() -> Callable[[], Tensor]:
        loaded.append(1)
        return lambda: model(torch.ones(4, 3)).sum()

    calibrate(alone, model, lambda it: torch.optim.SGD(it.parameters(), 0.1), take, 4)
    return model, loaded


def test_one_rank_writes_gradients_in_the_order_in_which_they_are_ready(alone: Any, tmp_path: Path) -> None:
    _, loaded = fill(alone)
    assert len(loaded) == STEPS + 3
    document = json.loads((tmp_path / FILE).read_text())
    assert {row["name"][0] for row in document["tensors"][:2]} == {"1"}  # the backward pass begins with the last layer
    assert {row["name"]: (row["bytes"], row["rows"]) for row in document["tensors"]} == {
        "0.weight": (24, 2),
        "0.bias": (8, 1),
        "1.weight": (8, 1),
        "1.bias": (4, 1),
    }
    assert all(row["ready_p10"] <= row["ready_p50"] <= row["ready_p90"] for row in document["tensors"])
    assert (document["schema_version"], document["ranks"], document["batch"]) == (1, 1, 4)
    assert (document["collectives"], document["overlap"], "buckets" in document) == ([], None, False)
    assert document["forward"][1] <= document["backward"][1] <= document["step"][1]


def test_only_rank_0_writes(alone: Any, tmp_path: Path) -> None:
    alone.is_first = False
    fill(alone)
    assert not (tmp_path / FILE).exists()


def test_buckets_are_added_by_rank_0_to_a_document_that_exists(alone: Any, tmp_path: Path) -> None:
    add_buckets(alone, [8, 4])
    assert not (tmp_path / FILE).exists()
    (tmp_path / FILE).write_text('{"ranks": 1}')
    add_buckets(alone, [])
    alone.is_first = False
    add_buckets(alone, [1])
    assert json.loads((tmp_path / FILE).read_text()) == {"ranks": 1}
    alone.is_first = True
    add_buckets(alone, [8, 4])
    assert json.loads((tmp_path / FILE).read_text()) == {"ranks": 1, "buckets": [8, 4]}
