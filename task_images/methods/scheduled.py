"""Synchronous SGD whose messages start during the backward pass: the same training as `bsp`, by other schedules.

They differ in which tensors share a message (`plan`), in the order of messages (`arrange`), and in whether the next
forward pass waits for all of them (`gates`).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from task_images.methods import nn, plans, torch
from task_images.methods.base import NOTHING, LossScale, set_rate, size_option
from task_images.methods.buckets import Bucketed, Finish, Message
from task_images.methods.plans import Cost, Groups

if TYPE_CHECKING:
    from task_images.methods.base import Link, Pending

# Backward passes measured by methods whose plan depends on them. The first updates, in which kernels are compiled and
# selected, are skipped; medians of the others are used.
SKIPPED_UPDATES, MEASURED_UPDATES = 3, 5
COST_SIZES = (1024, 16384, 65536, 262144)  # 4-byte elements
BURSTS = (2, 12)  # messages of a short and a long burst
BUCKET = size_option("25MiB", "a message is sent once its tensors have so many bytes")


class Wfbp(Bucketed):
    """Wait-free backpropagation."""

    name = "wfbp"
    summary = "one message per tensor, as soon as it is ready"
    source = "Zhang et al. 2017 (Poseidon), arXiv:1706.03292"
    exact = True

    def plan(self, sizes: Sequence[int], ready: Sequence[float]) -> Groups:
        """Each tensor has its own message."""
        return [[number] for number in range(len(sizes))]


class Fusion(Bucketed):
    """Tensor fusion."""

    name = "fusion"
    summary = "merges tensors into messages of up to 25 MiB"
    source = "Sergeev and Del Balso 2018, arXiv:1802.05799"
    options = {"bucket": BUCKET}  # noqa: RUF012
    exact = True


class Measured(Bucketed):
    """Methods whose plan or order depends on measured backward passes, and on the measured cost of a message. Until
    they are measured, `is_measuring` is set, and `ready` are just numbers in the order."""

    settling = SKIPPED_UPDATES + MEASURED_UPDATES

    def start(self) -> None:
        """Measure the cost of messages."""
        self.is_measuring = True
        self._started: Any = 0.0
        self._times: dict[str, Any] = {}  # when gradients of this update became ready
        self._seconds: list[dict[str, float]] = []  # of earlier updates, since the first gradient
        found = plans.fit(measure_cost(self.link))
        self.cost = Cost(self.world.agree(found.alpha), self.world.agree(found.beta))
        super().start()

    def open_update(self) -> None:
        """Begin to measure the backward pass."""
        super().open_update()
        if self.is_measuring:
            self._times, self._started = {}, self._now()

    def _on_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self.is_last_pass and self.is_measuring:
            if not self._open:
                self.open_update()
            self._times[name] = self._now()
        super()._on_gradient(name, parameter)

    def reduce(self) -> None:
        """Wait for all messages, and plan again."""
        super().reduce()
        if self.is_measuring:
            self.plan_again()

    def _now(self) -> Any:
        """The current time of the device: on a GPU hooks run when kernels are launched, not when they finish."""
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.world.device))
        return event

    def plan_again(self) -> None:
        """Note this backward pass. Once enough are measured, make the final plan from rank 0's times."""
        self.world.synchronize()
        started = self._started
        if isinstance(started, float):
            self._seconds.append({name: moment - started for name, moment in self._times.items()})
        else:
            self._seconds.append({name: started.elapsed_time(event) / 1e3 for name, event in self._times.items()})
        if len(self._seconds) < SKIPPED_UPDATES + MEASURED_UPDATES:
            return
        self.is_measuring = False
        names, counted = [name for name, _ in self._named], self._seconds[SKIPPED_UPDATES:]
        medians = {name: statistics.median(row[name] for row in counted if name in row) for name in counted[-1]}
        late = max(medians.values(), default=0.0)  # for parameters without a gradient
        own = torch.tensor([medians.get(name, late) for name in names], dtype=torch.float64)
        ready = self.world.broadcast(own.to(self.world.device)).tolist()
        order = sorted(range(len(names)), key=lambda number: (ready[number], number))
        self._named = [self._named[number] for number in order]
        self._rebuild([ready[number] for number in order])

    def _rebuild(self, ready: list[float]) -> None:
        """Make the final plan while gradients keep this update's values."""
        gradients = {name: slot.view.clone() for name, slot in self._slots.items()}
        self._build(ready)
        for name, slot in self._slots.items():
            slot.view.copy_(gradients[name])
            slot.parameter.grad = slot.view


def measure_cost(link: Link) -> list[tuple[float, float]]:
    """Bytes and seconds that one more all-reduce adds to a burst, for each of COST_SIZES. Collective.

    Comparing a short burst with a long one removes the fixed cost of a burst (until all ranks have started, and until
    all are done), which is as long as several messages if there are more ranks than cores.
    """
    before = link.messages, link.bytes, link.wire_bytes, link.exposed, link.busy
    short, long = BURSTS
    found = []
    for size in COST_SIZES:
        extra = _measure_burst(link, size, long) - _measure_burst(link, size, short)
        found.append((4.0 * size, extra / (long - short)))
    link.messages, link.bytes, link.wire_bytes, link.exposed, link.busy = before
    return found


def _measure_burst(link: Link, size: int, count: int) -> float:
    tensors = [torch.zeros(size, device=link.device) for _ in range(count + 2)]
    for tensor in tensors[:2]:  # warm-up
        link.all_reduce(tensor)
    _synchronize(link.device)
    begin = time.perf_counter()
    for pending in [link.start_all_reduce(tensor) for tensor in tensors[2:]]:
        pending.wait()
    _synchronize(link.device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MgWfbp(Measured):
    """Merged-gradient WFBP."""

    name = "mgwfbp"
    summary = "merges tensors if that saves more startup time than it costs in waiting (greedy, from measured times)"
    source = "Shi et al. 2019, arXiv:1811.11141"
    exact = True
    merge: Callable[..., Groups] = staticmethod(plans.merge_greedily)

    def plan(self, sizes: Sequence[int], ready: Sequence[float]) -> Groups:
        """All tensors share a message until backward passes are measured: a message for each could take seconds on slow
        links, and would slow the measured pass."""
        return super().plan(sizes, ready) if self.is_measuring else self.merge(sizes, ready, self.cost)


class OptFusion(MgWfbp):
    """The best merge under the same model."""

    name = "optfusion"
    summary = "the best grouping under mgwfbp's cost model, found by dynamic programming"
    source = "the cost model of arXiv:1811.11141"
    merge = staticmethod(plans.find_optimum)


class Gated(Bucketed):
    """Methods whose updates end in the next forward pass: each module's waits for the messages of its own parameters
    and updates them. Parameters that several modules share, and those of modules without a forward pass, are updated
    before the whole model's."""

    gates = True
    exact = True

    def start(self) -> None:
        """Hook the modules, too."""
        super().start()
        self._due: float | None = None  # learning rate of the update that waits at the gates
        self._applied: set[str] = set()
        self._gated: set[str] = set()  # parameters that have had a gate
        names = {id(slot.parameter): name for name, slot in self._slots.items()}
        own = [list(module.parameters(recurse=False)) for module in self.model.modules()]
        uses = Counter(id(parameter) for parameters in own for parameter in parameters)
        self.model.register_forward_pre_hook(self._pass_first_gate)
        for module, parameters in zip(self.model.modules(), own, strict=True):
            alone = [names[id(item)] for item in parameters if id(item) in names and uses[id(item)] == 1]
            if alone:
                module.register_forward_pre_hook(partial(self._pass_gate, alone))

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update."""
        if scale is not None and self.world.size > 1:
            raise ValueError("without a barrier, an overflow cannot be detected before the update")
        super().begin(weight, total, passes, scale)

    def open_update(self) -> None:
        """Complete the last update before its buckets are filled again."""
        self._drain()
        super().open_update()

    def reduce(self) -> None:
        """Send the rest, and wait for nothing."""
        self.end_backward()

    def apply(self, rate: float, clip: float | None) -> bool:
        """Leave the update to the gates."""
        if self.world.size == 1:
            return super().apply(rate, clip)
        self._due = rate
        return True

    def consensus(self) -> AbstractContextManager[object]:
        """Complete the update; the replicas are equal then."""
        if self.world.size > 1:
            self._drain()
        return NOTHING

    def _pass_first_gate(self, module: nn.Module, inputs: object) -> None:
        if self._due is not None and torch.is_grad_enabled():
            self._complete([name for name in self._slots if name not in self._gated])

    def _pass_gate(self, names: list[str], module: nn.Module, inputs: object) -> None:
        self._gated.update(names)
        if self._due is not None and torch.is_grad_enabled():
            self._complete(names)

    def _drain(self) -> None:
        if self._due is not None:
            self._complete(list(self._slots))
            self._applied.clear()
            self._due = None

    def _complete(self, names: list[str]) -> None:
        """Update some parameters, once their messages have arrived."""
        wanted = [self._slots[name] for name in names if name not in self._applied]
        if not wanted:
            return
        before = self.enter("communication")
        self.wait_for(message for slot in wanted for message in slot.bucket.messages)
        self.enter("optimizer")
        assert self._due is not None
        set_rate(self.optimizer, self._due)
        chosen, groups = {id(slot.parameter) for slot in wanted}, self.optimizer.param_groups
        parts = [{**group, "params": [item for item in group["params"] if id(item) in chosen]} for group in groups]
        self.optimizer.param_groups = [part for part in parts if part["params"]]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        self.enter(before)
        for slot in wanted:
            slot.parameter.grad = None
        self._applied.update(slot.name for slot in wanted)


class ByteScheduler(Gated, Measured):
    """Priorities: all ranks send in the order in which one link would, that always takes the ready message closest to
    the input. It is simulated with rank 0's measured times."""

    name = "bytescheduler"
    summary = "splits tensors and sends those of the first layers first; a forward pass waits only for its own layer"
    source = "Peng et al. 2019, SOSP"
    options = {"partition": size_option("4MB", "messages are cut into parts of at most this size")}  # noqa: RUF012

    def apply(self, rate: float, clip: float | None) -> bool:
        """Leave the update to the gates, unless its backward pass is measured."""
        updated = super().apply(rate, clip)
        if self.world.size > 1 and self.is_measuring:
            self._drain()
            self.plan_again()
        return updated

    def _rebuild(self, ready: list[float]) -> None:
        super()._rebuild(ready)
        for slot in self._slots.values():
            slot.parameter.grad = None

    def plan(self, sizes: Sequence[int], ready: Sequence[float]) -> Groups:
        """Each tensor has its own messages."""
        return [[number] for number in range(len(sizes))]

    def cut(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Parts of at most `partition` bytes."""
        return cut(flat, self.values["partition"])

    def arrange(self, messages: list[Message]) -> list[Message]:
        """The simulated order."""
        if self.is_measuring:
            return messages
        numbers = plans.simulate_order(
            [message.size for message in messages],
            [message.bucket.ready for message in messages],
            [-message.bucket.depth for message in messages],
            self.cost,
        )
        return [messages[number] for number in numbers]


class Dear(Gated):
    """Decoupled all-reduce."""

    name = "dear"
    summary = "reduce-scatter during the backward pass, all-gather during the next forward pass"
    source = "Zhang et al. 2023, arXiv:2302.12445"
    formula = "2 (P-1)/P M; 3 (P-1)/P M with gloo, whose reduce-scatter is an all-reduce"
    options = {"bucket": BUCKET}  # noqa: RUF012
    collective = "rsag"

    def open_update(self) -> None:
        """Begin to fill the buckets."""
        super().open_update()
        self._parts: list[tuple[Message, torch.Tensor, Pending]] = []

    def send(self, message: Message) -> Finish:
        """Start the reduce-scatter, padded to a multiple of the number of ranks."""
        size = self.world.size
        whole = nn.functional.pad(message.flat, (0, -message.flat.numel() % size))
        own = whole.new_empty(whole.numel() // size)
        self._parts.append((message, own, self.link.start_reduce_scatter(own, whole)))
        return _nothing

    def end_backward(self) -> None:
        """Start to gather, first what the next forward pass needs first."""
        super().end_backward()
        for _, _, pending in self._parts:
            pending.wait()
        for message, own, _ in sorted(self._parts, key=lambda part: -part[0].bucket.depth):
            whole = own.new_empty(own.numel() * self.world.size)
            message.finish = partial(_take, message.flat, whole, self.link.start_all_gather(whole, own))


def cut(flat: torch.Tensor, limit: int) -> Sequence[torch.Tensor]:
    """Parts of at most `limit` bytes."""
    return torch.split(flat, max(1, limit // flat.element_size()))


def _nothing() -> None:
    """Nothing to wait for."""


def _take(flat: torch.Tensor, whole: torch.Tensor, pending: Pending) -> None:
    pending.wait()
    flat.copy_(whole[: flat.numel()])
