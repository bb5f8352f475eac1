"""The tracker's, and the whole training loop's, share of a training step of digits_resnet: at most 1 % each.

Direct: the cost of one step's borders, measured by themselves, against the median step. Paired: steps with and without
a tracker in turn, on the same model, so that both see the same machine; the difference of medians is mostly noise.
Harness: a Trainer (tracker, losses, schedule, events) and a bare loop in turn on a model that costs next to nothing;
what the Trainer takes longer, per step, against the median step of digits_resnet.
"""

import contextlib
import io
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from task_images.clock import Tracker
from task_images.contract import Contract
from task_images.data import ArrayData
from task_images.methods.base import Bsp
from task_images.report import Reporter
from task_images.resnet import resnet
from task_images.schedules import Constant, PerUpdate
from task_images.train import Plan, Samples, Trainer
from task_images.world import open_world

BATCH = 32
PAIRS = 150
CATEGORIES_OF_A_STEP = (
    *("preprocessing", "forward", "loss", "backward", "communication", "optimizer", "communication", "metrics"),
)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bare, tracked = make_step(None), make_step(Tracker())
    for _ in range(10):
        bare()
        tracked()
    times: dict[str, list[float]] = {"bare": [], "tracked": []}
    for pair in range(PAIRS):
        order = [("bare", bare), ("tracked", tracked)]
        for name, step in order if pair % 2 else reversed(order):
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    step_seconds, tracked_seconds = (statistics.median(times[name]) for name in ("bare", "tracked"))
    cost = borders_cost()
    print(f"step of digits_resnet, batch {BATCH}:  {1e3 * step_seconds:8.3f} ms")
    print(f"tracker's borders of one step:   {1e6 * cost:8.1f} us  = {cost / step_seconds:.3%} (budget 1 %)")
    print(f"tracked / bare, {PAIRS} pairs:       {tracked_seconds / step_seconds:8.4f}")
    loop = loop_cost()
    print(f"loop with tracker, one step:     {1e6 * loop:8.1f} us  = {loop / step_seconds:.3%} (budget 1 %)")


def make_step(tracker: Tracker | None) -> Callable[[], None]:
    """One training step as train makes it, with a tracker or with nothing in its place."""
    model = resnet(20)
    optimizer = torch.optim.SGD(model.parameters(), 0.002, momentum=0.9, nesterov=True, fused=True)
    images, labels = torch.randn(BATCH, 3, 8, 8), torch.randint(10, (BATCH,))

    def enter(category: str) -> None:
        if tracker:
            tracker.enter(category)

    def step() -> None:
        enter("data_wait")
        enter("preprocessing")
        inputs = images.clone()
        enter("forward")
        outputs = model(inputs)
        enter("loss")
        loss = cross_entropy(outputs, labels)
        enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        enter("communication")
        enter("optimizer")
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        enter("communication")
        enter("metrics")
        loss.detach()
        if tracker:
            tracker.end_step(BATCH)

    return step


def borders_cost(repeats: int = 20000) -> float:
    """Seconds of all the tracker's calls in one step, with nothing between them."""
    tracker = Tracker()
    begin = time.perf_counter()
    for _ in tracker.steps(range(repeats)):
        for name in CATEGORIES_OF_A_STEP:
            tracker.enter(name)
        tracker.end_step(BATCH)
    return (time.perf_counter() - begin) / repeats


def loop_cost(samples: int = 32_000, rounds: int = 5) -> float:
    """Seconds a step that a Trainer takes longer than a bare loop; the least of each, so of an undisturbed machine."""
    world = open_world(Contract({"OMP_NUM_THREADS": "1"}))
    inputs = torch.randn(samples, 4).numpy()
    targets = (inputs[:, 0] > 0).astype(np.int64)
    data = ArrayData(world, (inputs, targets), (inputs, targets), BATCH, 1)
    times: dict[str, list[float]] = {"bare": [], "trainer": []}
    for _ in range(rounds):
        model, optimizer = make_small()
        begin = time.perf_counter()
        for batch in data.training(1):
            inputs_, targets_ = data.prepare(batch, training=True)
            cross_entropy(model(inputs_), targets_).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        times["bare"].append(time.perf_counter() - begin)
        model, _ = make_small()
        trainer = Trainer(
            world, Reporter(world, "numbers", synthetic=True), Samples(data, world, model, cross_entropy),
            PerUpdate(Constant(0.1)), Plan(1), make_optimizer=make_optimizer, method=Bsp(),
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            begin = time.perf_counter()
            trainer.run()
            times["trainer"].append(time.perf_counter() - begin)
    return (min(times["trainer"]) - min(times["bare"])) / data.steps


def make_small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 2)
    return model, make_optimizer(model)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, fused=True)


if __name__ == "__main__":
    main()
