"""The tracker on a device that runs behind the host: a stub that counts how often the host waits for it."""

import contextlib
import io
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from task_images.clock import RESOLVE_EVERY, Tracker
from task_images.contract import Contract
from task_images.data import ArrayData
from task_images.loop import Plan
from task_images.methods.allreduce import Bsp
from task_images.metrics import TopK
from task_images.report import Reporter
from task_images.run import tells_of_lost_peer
from task_images.schedules import Constant, PerUpdate
from task_images.train import make_sample_trainer
from task_images.world import open_world


class StubDevice:
    """A device whose clock the test moves; it has done what was ordered only after a wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0
        self.reached = -1.0

    def record(self) -> object:
        return self.now

    def wait(self, mark: object) -> None:
        assert isinstance(mark, float)
        self.waits += 1
        self.reached = mark

    def seconds_between(self, first: object, last: object) -> float:
        assert isinstance(first, float)
        assert isinstance(last, float)
        assert last <= self.reached, "the mark is read before the device came to it"
        return last - first


def test_work_is_booked_by_the_marks_around_it() -> None:
    device = StubDevice()
    tracker = Tracker(marks=device)
    tracker.restart()
    device.now = 1.0
    with tracker.step(samples=4):
        with tracker.section("forward"):
            device.now = 3.0
        with tracker.section("validation"), tracker.section("forward"):
            device.now = 3.5
        device.now = 4.0
    found = tracker.snapshot()
    assert found.seconds["forward"] == 2.0
    assert found.seconds["validation"] == 0.5
    assert found.seconds["other"] == 1.5
    assert sum(found.seconds.values()) == found.wall == 4.0
    assert (found.training, found.samples, found.updates) == (2.5, 4, 1)
    assert device.waits == 1


def test_a_resumed_clock_goes_on() -> None:
    device = StubDevice()
    tracker = Tracker(marks=device)
    device.now = 5.0
    earlier = tracker.snapshot()
    again = Tracker(marks=device)
    again.restart(earlier)
    device.now = 7.0
    assert again.snapshot().wall == earlier.wall + 2.0


def test_the_host_waits_once_for_hundreds_of_borders() -> None:
    device = StubDevice()
    tracker = Tracker(marks=device)
    tracker.restart()
    for _ in range(2 * RESOLVE_EVERY):
        with tracker.section("forward"):
            pass
    assert device.waits == 4


def test_a_training_waits_for_its_device_less_than_once_in_five_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, borders and reports as a Trainer makes them; losses and metrics are summed on their device."""
    device = StubDevice()
    world = open_world(Contract({"OMP_NUM_THREADS": "1"}))
    monkeypatch.setattr(world, "marks", lambda: device)
    transfers: list[torch.Tensor] = []
    plain = torch.Tensor.tolist

    def count_transfer(tensor: torch.Tensor) -> object:
        transfers.append(tensor)
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", count_transfer)
    samples = (np.ones((800, 4), np.float32), np.arange(800) % 3)
    trainer = make_sample_trainer(
        world, Reporter(world, "ones", synthetic=True), ArrayData(world, samples, samples, 8, 1), nn.Linear(4, 3),
        nn.functional.cross_entropy, lambda model: torch.optim.SGD(model.parameters(), 0.01),
        PerUpdate(Constant(0.01)), Plan(2), method=Bsp(), metrics=[TopK(1)],
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.run()
    steps = trainer.position.total
    assert steps == 200
    assert device.waits / steps <= 0.2
    assert (device.waits + len(transfers)) / steps <= 0.35


def test_windows_of_marks_are_read_in_order() -> None:
    """However many borders lie between two waits, the categories add up to the wall time."""
    device = StubDevice()
    tracker = Tracker(marks=device)
    tracker.restart()
    names = ("forward", "loss", "backward")
    for index in range(1000):
        with tracker.section(names[index % 3]):
            device.now += 0.25
    found = tracker.snapshot()
    assert found.wall == 250.0
    assert [found.seconds[name] for name in names] == [83.5, 83.25, 83.25]
    assert all(first >= last for first, last in pairwise([83.5, 83.25, 83.25]))


@pytest.mark.parametrize(
    "words",
    [
        "NCCL error: socketProgress: Connection closed by remote peer node-3<40122>",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE)",
        "NCCL communicator was aborted on rank 0.",
    ],
)
def test_lost_peers_are_known_by_the_words_of_nccl(words: str) -> None:
    assert tells_of_lost_peer(RuntimeError(words))
