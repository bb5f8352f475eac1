"""Messages during the backward pass: hooks move gradients into buckets, and each full one is sent.

A bucket is a flat buffer in which the gradients of some parameters share a message, or several if it is cut. Gradients
are weighted when they are moved, and afterwards are views of the buffer. Messages start in the same order on all ranks:
a full bucket waits for those that come before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from task_images.methods import nn, plans, torch
from task_images.methods.base import Method, make_views
from task_images.methods.plans import Groups

Finish = Callable[[], None]


@dataclass
class Slot:
    """One parameter and its place in a bucket; `depth` is its place in the order in which gradients become ready."""

    name: str
    parameter: nn.Parameter
    view: torch.Tensor
    bucket: Bucket
    depth: int
    has_arrived: bool = False


@dataclass
class Message:
    """A part of a bucket that is sent at once. `finish` waits until it has the sum over ranks."""

    number: int
    flat: torch.Tensor
    bucket: Bucket
    finish: Finish | None = None

    @property
    def size(self) -> int:
        """Bytes of its gradients."""
        return self.flat.numel() * self.flat.element_size()


@dataclass
class Bucket:
    """Parameters whose gradients share a buffer, and the messages that it is cut into."""

    flat: torch.Tensor
    ready: float  # when its last gradient is ready, in seconds, or just a number in the order
    slots: list[Slot] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    missing: int = 0

    @property
    def depth(self) -> int:
        """The place of its last parameter in the backward pass: higher is closer to the input."""
        return max(slot.depth for slot in self.slots)


class Bucketed(Method):
    """Averages gradients over ranks in buckets. Subclasses say how tensors are grouped, and how a message is sent."""

    hooks = True

    def plan(self, sizes: Sequence[int], ready: Sequence[float]) -> Groups:
        """Which tensors share a bucket: consecutive ones until they have as many bytes as the option `bucket` says, or
        all without it. `ready`: when each is ready, or just numbers in the order."""
        return plans.threshold(sizes, self.values.get("bucket", math.inf))

    def cut(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """The messages of a bucket."""
        return [flat]

    def arrange(self, messages: list[Message]) -> list[Message]:
        """The order in which messages are sent."""
        return messages

    def send(self, message: Message) -> Finish:
        """Start to sum a message over ranks, in place; returns what waits for it."""
        return self.link.start_all_reduce(message.flat).wait

    # --- set-up -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the plan and hook the parameters."""
        self.is_last_pass = self._open = False
        self._next = 0  # message to be sent next
        named = [(name, item) for name, item in self.model.named_parameters() if item.requires_grad]
        self._named = named[::-1]  # about the order in which gradients become ready
        self._build([float(number) for number in range(len(self._named))])
        for name, parameter in self._named:
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]

    def _build(self, ready: list[float]) -> None:
        """Create the buckets of `_named`, whose gradients are ready at `ready` seconds, ascending."""
        by_type: dict[object, list[int]] = {}
        for number, (_, parameter) in enumerate(self._named):
            by_type.setdefault((parameter.dtype, parameter.device), []).append(number)
        groups: list[list[int]] = []
        for members in by_type.values():
            sizes = [_size(self._named[number][1]) for number in members]
            found = self.plan(sizes, [ready[number] for number in members])
            groups += [[members[place] for place in group] for group in found]
        self.buckets: list[Bucket] = []
        self._slots: dict[str, Slot] = {}
        messages: list[Message] = []
        for group in sorted(groups, key=lambda group: group[-1]):
            first = self._named[group[0]][1]
            count = sum(self._named[number][1].numel() for number in group)
            bucket = Bucket(torch.zeros(count, dtype=first.dtype, device=first.device), ready[group[-1]])
            views = make_views(bucket.flat, [self._named[number][1] for number in group])
            for number, view in zip(group, views, strict=True):
                name, parameter = self._named[number]
                self._slots[name] = slot = Slot(name, parameter, view, bucket, number)
                bucket.slots.append(slot)
            for part in self.cut(bucket.flat):
                bucket.messages.append(Message(len(messages), part, bucket))
                messages.append(bucket.messages[-1])
            self.buckets.append(bucket)
        self.messages = self.arrange(messages)

    # --- an update ----------------------------------------------------------------------------------------------------

    def open_update(self) -> None:
        """Begin to fill the buckets; the sums of the last update are no longer needed."""
        self._open, self._next = True, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.has_arrived = False

    def _on_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if not self.is_last_pass:
            return
        if not self._open:
            self.open_update()
        self._take(self._slots[name])
        self._send_ready()

    def _take(self, slot: Slot) -> None:
        """Move a gradient into its bucket, weighted."""
        gradient = slot.parameter.grad
        if gradient is None:
            slot.view.zero_()
        else:
            torch.mul(gradient, self.share, out=slot.view)
        slot.parameter.grad = slot.view
        slot.has_arrived = True
        slot.bucket.missing -= 1

    def _send_ready(self) -> None:
        while self._next < len(self.messages) and not self.messages[self._next].bucket.missing:
            message = self.messages[self._next]
            self._next += 1
            message.finish = self.send(message)

    def end_backward(self) -> None:
        """Take what has no gradient, or had none of its own, and send the rest."""
        self.is_last_pass = False
        if not self._open:
            self.open_update()
        self._open = False
        for slot in self._slots.values():
            if not slot.has_arrived:
                self._take(slot)
        self._send_ready()

    def wait_for(self, messages: Iterable[Message]) -> None:
        """Wait until the sums of `messages` have arrived."""
        for message in messages:
            if message.finish is not None:
                message.finish()
                message.finish = None

    def reduce(self) -> None:
        """Wait for all messages, in the order of sending."""
        self.end_backward()
        self.wait_for(self.messages)

    def stats(self) -> dict[str, float]:
        """The common figures, and the number of buckets."""
        return {**super().stats(), **({"groups": float(len(self.buckets))} if self.world.size > 1 else {})}


def _size(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()
