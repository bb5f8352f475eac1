"""mlbench's own reducer: hooks fill messages during the backward pass, and one thread sends them in a fixed order.

Gradients are scaled and copied into flat buffers in the order of the plan; after that, a parameter's gradient is a view
of its buffer. The thread takes the messages in the same order on every rank, waits until each is ready, and runs all
rounds of its transport; callbacks do not block. Methods without a barrier use forward gates: a layer's forward pass
waits for the layer's messages and updates its parameters.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from task_images.comm import plans
from task_images.comm.base import MethodState, Strategy, Traits, keep_own, set_rate
from task_images.comm.client import ServerSum, make_server_transport
from task_images.comm.exchange import Matrix, Transport, make_message, make_transport
from task_images.comm.link import Leader, measure_cost, open_link
from task_images.comm.methods import Method, parse_size
from task_images.comm.plans import Cost
from task_images.comm.sender import Group, Sender, Slot
from task_images.harness.errors import TaskUsageError
from task_images.harness.precision import LossScale
from task_images.harness.replicas import measure_distance

# Backward passes measured for the plans mgwfbp and optimal and the order priority. The first updates, in which kernels
# are compiled and selected, are skipped; medians of the others are used.
SKIPPED_UPDATES, MEASURED_UPDATES = 3, 5
Moment = float | torch.cuda.Event
COST_SIZES = (1024, 16384, 65536, 262144)  # 4-byte elements


class Reducer(Strategy):
    """Averages gradients over ranks, weighted by batch size and compressed by the method's codec."""

    _clear_to_none = True

    def __init__(self, method: Method, seed: int = 0) -> None:
        self.method = method
        self._seed = seed
        exact = method.transport != "noop"
        self.traits = Traits(exact, exact, method.barrier == "step")

    # --- set-up ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._update = 0
        self._armed = self._is_guarded = False
        self._clip: float | None = None
        self._finite: Tensor | None = None  # whether this rank's gradients of the update are finite
        self._started: Moment = 0.0
        self._open = False  # messages of an update are in flight
        self._due: float | None = None  # learning rate of an update pending at the forward gates
        self._groups: list[Group] = []
        self._slots: list[Slot] = []
        self._measuring = False
        if self.world.size == 1:
            return
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self._named = list(reversed(named))  # approximate order in which gradients become ready
        self._times: list[dict[str, Moment]] = []  # of the current update, by parameter
        self._seconds: list[dict[str, float]] = []  # of earlier updates, relative to the first gradient
        self._cost = Cost(0.0, 0.0)
        if self.method.momentum != "none":
            self._take_over_momentum()
        self._link = open_link(self.world, self.method.delay)
        self._transport = self._make_transport()
        timeline = self._tracker.timeline if self._tracker else None
        leader = Leader(self.world) if self.method.agreement == "leader" else None
        self._sender = Sender(self._transport, parse_size(self.method.credit), timeline, leader)
        self._measuring = needs_profile(self.method)
        if self._measuring:
            self._cost = self._measure_cost()
        self._build([float(number) for number in range(len(self._named))], measured=False)
        for index, slot in enumerate(self._slots):
            slot.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))  # type: ignore[no-untyped-call]
        if self.method.barrier == "none":
            self._gate_modules()

    def _take_over_momentum(self) -> None:
        """Disable the optimizer's momentum: the codec applies it."""
        if not isinstance(self.optimizer, torch.optim.SGD):
            raise TaskUsageError(
                f"{self.method.name} replaces SGD's momentum by its own, so it cannot use "
                f"{type(self.optimizer).__name__}",
                "--method eftopk, or choose SGD as the task's optimizer.",
            )
        for group in self.optimizer.param_groups:
            group["momentum"], group["nesterov"] = 0.0, False

    def _make_transport(self) -> Transport:
        if self.method.transport == "ps":
            return make_server_transport(self.method, self._link, self.world)
        return make_transport(self.method, self._link)

    def _measure_cost(self) -> Cost:
        with self._link.leave_out():
            seconds = measure_cost(self._link, COST_SIZES)
        found = plans.fit([(4 * size, time) for size, time in zip(COST_SIZES, seconds, strict=True)])
        return Cost(self.world.agree(found.alpha), self.world.agree(found.beta))

    def _build(self, ready: list[float], measured: bool) -> None:
        """Create groups, messages and their order for `self._named`, whose gradients are ready at `ready` (seconds,
        ascending)."""
        self._groups, slots = [], {}
        by_type: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, (_, parameter) in enumerate(self._named):
            by_type.setdefault((parameter.dtype, parameter.device), []).append(number)
        # One message until then: a message per tensor could take seconds on slow links and would slow the measured
        # pass.
        plan = "all" if self._measuring and self.method.plan in ("mgwfbp", "optimal") else self.method.plan
        numbered: list[list[int]] = []
        for members in by_type.values():
            sizes = [_size(self._named[number][1]) for number in members]
            groups = plans.build(plan, sizes, [ready[number] for number in members], self._cost)
            numbered += [[members[place] for place in group] for group in groups]
        indices = {id(slot.parameter): slot.index for slot in self._slots}
        for numbers in sorted(numbered, key=lambda group: group[-1]):
            first = self._named[numbers[0]][1]
            total = sum(self._named[number][1].numel() for number in numbers)
            group = Group(torch.zeros(total, dtype=first.dtype, device=first.device))
            self._groups.append(group)
            start = 0
            for number in numbers:
                name, parameter = self._named[number]
                view = group.flat.as_strided(parameter.size(), parameter.stride(), start)
                slot = Slot(indices.get(id(parameter), number), name, parameter, group, view, start)
                group.slots.append(slot)
                slots[slot.index] = slot
                start += parameter.numel()
        self._slots = [slots[index] for index in range(len(slots))]
        self._cut()
        self._arrange([ready[group[-1]] for group in sorted(numbered, key=lambda group: group[-1])], measured)

    def _now(self) -> Moment:
        """The current time of the device: on a GPU hooks run when kernels are launched, not when they finish."""
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.world.device))
        return event

    def _read_times(self, moments: Mapping[str, Moment]) -> dict[str, float]:
        """Seconds from the first gradient of an update to each gradient."""
        self.world.synchronize()
        found, started = {}, self._started
        for name, moment in moments.items():
            if isinstance(moment, float) and isinstance(started, float):
                found[name] = moment - started
            elif isinstance(moment, torch.cuda.Event) and isinstance(started, torch.cuda.Event):
                found[name] = float(started.elapsed_time(moment)) / 1e3
        return found

    def _cut(self) -> None:
        """Cut each group's buffer into messages."""
        number = 0
        for group in self._groups:
            limit = group.flat.numel()
            if self.method.partition != "none":
                limit = max(1, parse_size(self.method.partition) // group.flat.element_size())
            start = 0
            for part in torch.split(group.flat, limit):
                matrices = [_matrix(slot) for slot in group.slots] if self.method.codec_name == "powersgd" else []
                end = start + part.numel()
                spans = [
                    (max(start, slot.start), min(end, slot.start + slot.parameter.numel())) for slot in group.slots
                ]
                sizes = [last - first for first, last in spans if first < last]
                group.messages.append(make_message(self.method, number, part, self.world.rank, sizes, matrices))
                number, start = number + 1, end

    def _arrange(self, ready: list[float], measured: bool) -> None:
        """Set the order in which the thread takes messages, the same on all ranks."""
        entries = [(group, message) for group in self._groups for message in group.messages]
        order = entries
        if isinstance(self._transport, ServerSum):
            self._transport.arrange([message for _, message in entries])
        if self.method.order == "priority" and self.method.agreement == "leader":
            order = sorted(entries, key=lambda entry: -self._depth(entry[0]))
        elif self.method.order == "priority" and measured:
            times = {id(group): time for group, time in zip(self._groups, ready, strict=True)}
            numbers = plans.simulate_order(
                [message.size for _, message in entries],
                [times[id(group)] for group, _ in entries],
                [-self._depth(group) for group, _ in entries],
                self._cost,
            )
            order = [entries[number] for number in numbers]
        self._sender.arrange(order, sorted(entries, key=lambda entry: -self._depth(entry[0])))

    def _depth(self, group: Group) -> int:
        """Position of a group's last parameter in the backward pass: higher is closer to the input."""
        return max(self._place[slot.name] for slot in group.slots)

    @property
    def _place(self) -> dict[str, int]:
        return {name: number for number, (name, _) in enumerate(self._named)}

    # --- an update, on the training thread -------------------------------------------------------------------------

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update of `passes` backward passes, in which this rank has the weight `weight` / `total`."""
        if scale is not None and self.method.barrier == "none" and self.world.size > 1:
            raise ValueError("without a barrier, an overflow cannot be detected before the update")
        super().begin(weight, total, passes, scale)
        if self.world.size == 1:
            return
        self._share = weight / total
        if self.method.transport == "noop":
            self._share *= self.world.size
        is_lossy = self.method.codec not in ("none", "fp16", "bf16")
        if is_lossy:
            # Unscale now: the loss scale changes between updates, but residuals stay, and signs cannot be unscaled
            # later.
            self._share, self._divisor = self._share / self._divisor, 1.0
        # A codec may turn an overflow into a finite number that stays in the residual.
        self._is_guarded = scale is not None and is_lossy
        self._finite = None

    def last_pass(self) -> AbstractContextManager[object]:
        """A context for the last pass, in which messages are sent as soon as they are full."""
        return self._arm() if self.world.size > 1 else nullcontext()

    @contextmanager
    def _arm(self):  # type: ignore[no-untyped-def]
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        """Called when a gradient is complete: copy it, scaled, into the buffer. The last one marks its group ready."""
        if not self._armed:
            return
        if not self._open:
            self._start()
        slot = self._slots[index]
        if self._measuring:
            self._times[-1][slot.name] = self._now()
        self._take(slot)
        if slot.group.missing == 0 and self.method.order != "deferred":
            self._sender.release([slot.group])

    def _take(self, slot: Slot) -> None:
        """Move a gradient into the buffer."""
        gradient = slot.parameter.grad
        if gradient is None:
            slot.view.zero_()
        else:
            torch.mul(gradient, self._share, out=slot.view)
            if self._is_guarded:
                finite = slot.view.isfinite().all()
                slot.view.copy_(torch.where(finite, slot.view, 0.0))
                self._finite = finite if self._finite is None else self._finite & finite
        slot.parameter.grad = slot.view
        slot.arrived = True
        slot.group.missing -= 1

    def _start(self) -> None:
        """Start a new update. The previous one is complete: messages summed, parameters updated."""
        self._drain()
        for group in self._groups:
            group.missing, group.ready, group.pending = len(group.slots), False, len(group.messages)
            for slot in group.slots:
                slot.arrived = False
            if self._is_guarded:
                for message in group.messages:
                    message.keep()
        if self._measuring:
            self._started = self._now()
            self._times.append({})
        self._open = True
        self._update += 1
        for group in self._groups:
            for message in group.messages:
                message.codec.update = self._update
        self._sender.begin(self._seed * 1_000_003 + self._update)

    def _reduce(self) -> None:
        if self.world.size == 1:
            self._scale_alone()
            return
        self._finish_backward()
        self._sender.wait(self._groups)

    def _apply(self, rate: float, clip: float | None) -> bool:
        is_clipped = self.method.momentum != "none" and clip is not None and self.world.size > 1
        return super()._apply(rate, math.inf if is_clipped else clip)

    def _clip_own(self, clip: float) -> None:
        """Clip this rank's gradients, before they are accumulated, to 1/sqrt(P) of the limit (Lin et al. 2018, section
        3.2)."""
        views = [slot.view for slot in self._slots]
        # The views contain this rank's share of the mean, unscaled.
        limit = clip * self._weight / self._total / self.world.size**0.5
        torch._foreach_mul_(views, torch.clamp(limit / (nn.utils.get_total_norm(views) + 1e-6), max=1.0))

    def _finish_backward(self) -> None:
        """Count missing gradients as zeros."""
        if not self._open:
            self._start()
        for slot in self._slots:
            if not slot.arrived:
                self._take(slot)
        if self.method.momentum != "none" and self._clip is not None:
            self._clip_own(self._clip)
        self._sender.release([group for group in self._groups if not group.ready])

    def _agree(self, finite: bool) -> bool:
        """Ask all ranks if a codec may hide one rank's overflow from the others."""
        if not self._is_guarded:
            return finite
        own = finite and (self._finite is None or bool(self._finite))
        return self.world.max([0.0 if own else 1.0])[0] == 0

    def step(self, rate: float, clip: float | None = None) -> bool:
        """Update the model at learning rate `rate`; without a barrier, each tensor when it is used next.

        Raises ValueError for clipping without a barrier.
        """
        self._clip = clip
        if self.method.barrier == "step" or self.world.size == 1:
            applied = super().step(rate, clip)
            if self.world.size > 1 and self._is_guarded and not applied:
                for group in self._groups:
                    for message in group.messages:
                        message.restore()
            self._open = False
            self._plan_again()
            return applied
        if clip is not None:
            raise ValueError("without a barrier, gradients cannot be clipped by their norm")
        with self._section("communication"):
            self._finish_backward()
        self._due, self._open = rate, False
        if self._measuring:
            self._drain()
            self._plan_again()
        self._stats["updates"] += 1
        return True

    def _plan_again(self) -> None:
        """Once enough backward passes are measured, make the final plan from rank 0's times."""
        if not self._measuring:
            return
        self._seconds.append(self._read_times(self._times.pop()))
        if len(self._seconds) < SKIPPED_UPDATES + MEASURED_UPDATES:
            return
        self._measuring = False
        names = [name for name, _ in self._named]
        counted = self._seconds[SKIPPED_UPDATES:]
        medians = {name: statistics.median(row[name] for row in counted if name in row) for name in counted[-1]}
        late = max(medians.values(), default=0.0)  # for parameters without a gradient
        own = torch.tensor([medians.get(name, late) for name in names], dtype=torch.float64)
        ready = self.world.broadcast(own).tolist()
        order = sorted(range(len(names)), key=lambda number: (ready[number], number))
        self._named = [self._named[number] for number in order]
        state = self._own_state()
        self._build([ready[number] for number in order], measured=True)
        self._load_own_state(state)
        for slot in self._slots:
            slot.parameter.grad = None

    # --- forward gates -------------------------------------------------------------------------------------------

    def _gate_modules(self) -> None:
        """A module's parameters must be updated before its forward pass. Parameters shared by several modules, and
        those of modules that have no forward pass, must be updated before the whole model's."""
        self._applied: set[int] = set()
        self._gated: set[int] = set()
        self.model.register_forward_pre_hook(self._pass_first_gate)
        owned = {id(slot.parameter): slot.index for slot in self._slots}
        own = [list(module.parameters(recurse=False)) for module in self.model.modules()]
        uses = Counter(id(parameter) for parameters in own for parameter in parameters)
        for module, parameters in zip(self.model.modules(), own, strict=True):
            indices = [owned[id(item)] for item in parameters if id(item) in owned and uses[id(item)] == 1]
            if indices:
                module.register_forward_pre_hook(partial(self._pass_gate, indices))

    def _pass_first_gate(self, module: nn.Module, inputs: object) -> None:
        if self._due is not None and torch.is_grad_enabled():
            self._update_due([slot.index for slot in self._slots if slot.index not in self._gated])

    def _pass_gate(self, indices: list[int], module: nn.Module, inputs: object) -> None:
        self._gated.update(indices)
        if self._due is None or not torch.is_grad_enabled():
            return
        self._update_due(indices)

    def _update_due(self, indices: list[int]) -> None:
        waiting = [index for index in indices if index not in self._applied]
        if waiting:
            with self._section("communication"):
                self._sender.wait([self._slots[index].group for index in waiting])
            with self._section("optimizer"):
                self._update_parameters(waiting)

    def _update_parameters(self, indices: list[int]) -> None:
        assert self._due is not None
        set_rate(self.optimizer, self._due)
        wanted = {id(self._slots[index].parameter) for index in indices}
        groups = self.optimizer.param_groups
        chosen = [{**group, "params": [item for item in group["params"] if id(item) in wanted]} for group in groups]
        self.optimizer.param_groups = [group for group in chosen if group["params"]]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        for index in indices:
            self._slots[index].parameter.grad = None
        self._applied.update(indices)

    def _drain(self) -> None:
        """Finish an update that is pending at the gates."""
        if self._due is None:
            return
        self._sender.wait(self._groups)
        rest = [slot.index for slot in self._slots if slot.index not in self._applied]
        # A parameter that already has a gradient of the next update was updated before: its module ran.
        if rest:
            self._update_parameters(rest)
        self._applied.clear()
        self._due = None

    def consensus(self) -> AbstractContextManager[object]:
        """Finish pending messages; the replicas are equal then."""
        if self.world.size > 1:
            self._drain()
        return nullcontext()

    def check_replicas(self) -> float | None:
        """Check that models are equal if the method keeps them equal; measure their distance without communication."""
        if self.traits.identical or self.world.size == 1:
            return super().check_replicas()
        return measure_distance(self.world, self._parameters)

    # --- state and figures ---------------------------------------------------------------------------------------

    def method_state(self) -> MethodState:
        if self.world.size == 1:
            return {}
        own = self._own_state()
        return {"update": self._update, "ranks": keep_own(self.world, own) if any(own.values()) else []}

    def load_method_state(self, state: MethodState) -> None:
        if self.world.size == 1 or not state:
            return
        self._update = int(state.get("update", 0))
        if state.get("ranks"):
            self._load_own_state(pick_state(state["ranks"], self.world.rank, self.world.size))

    def _own_state(self) -> dict[str, dict[str, Tensor]]:
        """Residuals, velocities and factors of this rank, by parameter name."""
        found: dict[str, dict[str, Tensor]] = {"residual": {}, "velocity": {}, "factor": {}}
        for group in self._groups:
            for kind in ("residual", "velocity"):
                parts = [getattr(message, kind) for message in group.messages]
                if any(part is not None for part in parts):
                    whole = torch.cat(parts)
                    for slot in group.slots:
                        found[kind][slot.name] = whole[slot.start : slot.start + slot.parameter.numel()].cpu()
            for message in group.messages:
                found["factor"].update({name: factor.cpu() for name, factor in message.factors.items()})
        return found

    def _load_own_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for group in self._groups:
            for kind in ("residual", "velocity"):
                if not state[kind]:
                    continue
                whole = torch.cat([state[kind][slot.name] for slot in group.slots])
                start = 0
                for message in group.messages:
                    getattr(message, kind).copy_(whole[start : start + message.flat.numel()])
                    start += message.flat.numel()
            for message in group.messages:
                names = {matrix.name for matrix in message.matrices}
                message.factors = {
                    name: factor.to(message.flat) for name, factor in state["factor"].items() if name in names
                }

    def stats(self) -> dict[str, float]:
        """The common figures.

        Messages and bytes of this rank; seconds of queueing and of communication, exposed or hidden. No seconds on
        GPUs, where the host only launches communication and cannot time the network.
        """
        figures = super().stats()
        if self.world.size > 1:
            sender = self._sender
            figures.update(
                messages=float(self._link.messages),
                bytes=float(self._link.bytes),
                wire_bytes=self._link.wire_bytes,
                groups=float(len(self._groups)),
            )
            if self.world.device.type != "cuda":
                figures.update(
                    queue_seconds=sender.queue_seconds,
                    communication_seconds=sender.communication_seconds,
                    exposed_seconds=sender.exposed_seconds,
                    hidden_seconds=max(0.0, sender.communication_seconds - sender.exposed_seconds),
                )
        return figures

    def bucket_bytes(self) -> list[int]:
        """Bytes of each group's buffer, before its codec and before it is cut into messages."""
        return [] if self.world.size == 1 else [_size(group.flat) for group in self._groups]

    def close(self) -> None:
        """Finish pending messages and end the thread."""
        if self.world.size > 1:
            self._drain()
            self._sender.close()
            self._link.close()


def needs_profile(method: Method) -> bool:
    """Whether plan or order depend on measured backward passes."""
    by_profile = method.order == "priority" and method.agreement == "static"
    return method.plan in ("mgwfbp", "optimal") or by_profile


def pick_state(ranks: list[Any], rank: int, size: int) -> dict[str, dict[str, Tensor]]:
    """The state of rank `rank` of `size`, from the states of a run whose number of ranks may differ.

    Gradients and residuals are shares of a sum over ranks. If the number of ranks differs, each takes an equal part of
    the sum of the old states, so nothing is lost.
    """
    if len(ranks) == size:
        return dict(ranks[rank])
    found = {kind: dict(ranks[0][kind]) for kind in ranks[0]}
    for kind in ("residual", "velocity"):
        for name in found[kind]:
            found[kind][name] = torch.stack([other[kind][name] for other in ranks]).sum(0) / size
    return found


def _size(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _matrix(slot: Slot) -> Matrix:
    rows = slot.parameter.shape[0] if slot.parameter.dim() > 1 else 1
    return Matrix(slot.name, slot.start, rows, slot.parameter.numel() // max(1, rows))
