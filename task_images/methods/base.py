"""How ranks agree on an update. Read `Method.step` first; a method overrides what it does differently.

    module = method.attach(world, model, make_optimizer, tracker)
    each update:    method.begin(weight, total, passes, scale)
                    forward and backward passes; before the last of several: method.begin_last_pass()
                    method.step(rate, clip)
    validation:     with method.consensus(): ...

With a single rank nothing is exchanged, and of the hooks only `begin` and `step` are called.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from task_images.contract import DivergedError, TaskUsageError
from task_images.methods import Lazy, dist, nn, torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from task_images import world as replicas
    from task_images.clock import Tracker
    from task_images.world import World
else:
    replicas = Lazy("task_images.world")

MakeOptimizer = Callable[["torch.nn.Module"], "torch.optim.Optimizer"]
NOTHING: AbstractContextManager[object] = contextlib.nullcontext()
LOOK_EVERY = 50
RING = "2 (P-1)/P M"


class Sent(NamedTuple):
    """What a run counted in an update: messages and bytes handed to collectives by a rank, and parameters."""

    messages: float
    bytes: float
    parameters: int


class Round(NamedTuple):
    """Collectives of an update: `kind` is one of `Method.collective`, `size` the bytes that each rank contributes to
    one, `times` how many there are in an update, less than 1 if not each update has one."""

    kind: str
    size: float
    times: float = 1.0


@dataclass
class LossScale:
    """The factor on the loss that prevents small fp16 gradients from vanishing.

    Multiplied by `factor` after `window` consecutive updates without overflow, up to `largest`; divided by `factor`
    after an overflow, whose update is skipped.
    """

    value: float = 1.0
    factor: float = 2.0
    window: int = 2000
    largest: float = 2.0**24
    smallest: float = 1e-4
    good: int = field(default=0, init=False)  # updates since the scale last changed

    def observe(self, finite: bool) -> None:
        """Record one update. Raises DivergedError when the scale falls below `smallest`."""
        if not finite:
            self.value /= self.factor
            self.good = 0
            if self.value < self.smallest:
                raise DivergedError(
                    f"the gradients overflow even at a loss scale of {self.value:g}: the training has diverged",
                    "A lower learning rate may help, or the precision bf16 or fp32.",
                )
            return
        self.good += 1
        if self.good == self.window:
            self.value = min(self.value * self.factor, self.largest)
            self.good = 0


class NormWatch:
    """Checks that the norms of gradients are finite. On a GPU only every LOOK_EVERY updates, because each check makes
    the host wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._every = LOOK_EVERY if device.type == "cuda" else 1
        self._sum: torch.Tensor | None = None  # a sum stays non-finite after one non-finite term
        self._count = 0

    def add(self, norm: torch.Tensor) -> bool:
        """Add the norm of an update. False if this norm, or one since the last check, is known to be non-finite."""
        self._sum = norm if self._sum is None else self._sum + norm
        self._count += 1
        return self._count < self._every or self.look()

    def look(self) -> bool:
        """Whether all norms since the last check are finite. Waits for the device."""
        found = self._sum is None or math.isfinite(float(self._sum))
        self._sum, self._count = None, 0
        return found


# --- options, as users give them: --set comm.NAME=VALUE ---

UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}


class MethodError(ValueError):
    """An invalid method. `reason` is a sentence; `instead` is the nearest valid choice as command-line options."""

    def __init__(self, reason: str, instead: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.instead = instead


@dataclass(frozen=True)
class Option:
    """An option of a method: a number from `low` to `high`, whole if its default is; or text, read by `parse`.

    form    what to write, for the help; empty: a number
    """

    default: Any
    low: float = -math.inf
    high: float = math.inf
    help: str = ""
    parse: Callable[[str], Any] | None = None
    form: str = ""

    def __post_init__(self) -> None:
        """Raises TypeError for a default such as True, whose text would not be read as it was meant."""
        if self.parse is None and type(self.default) not in (int, float):
            raise TypeError(f"the default {self.default!r} of an option is no number, and nothing reads it (parse)")

    def read(self, name: str, text: str) -> Any:
        """The value of `text`. Raises MethodError."""
        try:
            if self.parse is not None:
                return self.parse(text)
            value = type(self.default)(text)
            if not self.low <= value <= self.high:
                raise ValueError
        except (ValueError, OverflowError):
            allowed = self.form or f"a {'whole ' * isinstance(self.default, int)}number {self.range}"
            raise MethodError(f"comm.{name} is {text!r}, not {allowed}", f"--set comm.{name}={self.default}") from None
        return value

    @property
    def range(self) -> str:
        """The range of its numbers, or the form of its text."""
        return self.form or f"from {self.low:g} to {self.high:g}"


def parse_size(text: str) -> int:
    """Bytes of a size such as 25MiB or 4096000. Raises ValueError."""
    digits = text.rstrip("BKMGik")
    unit = text[len(digits) :]
    value = float(digits)
    if unit not in UNITS or not 0 < value * UNITS[unit] < 2**50:
        raise ValueError(f"{text} is not a size")
    return int(value * UNITS[unit])


def parse_delay(text: str) -> tuple[float, float] | None:
    """The seconds of ALPHA,BETA: of each message, and of each of its bytes. Raises ValueError."""
    if text == "none":
        return None
    alpha, _, beta = text.partition(",")
    delay = float(alpha), float(beta)
    if not all(0 <= part < 60 for part in delay):
        raise ValueError(f"{text} is no delay")
    return delay


DELAY = Option(
    "none", help="delay added to each message: seconds, and seconds per byte", parse=parse_delay, form="ALPHA,BETA"
)


def size_option(default: str, help: str) -> Option:
    """An option whose value is a size in bytes."""
    return Option(default, help=help, parse=parse_size, form="a size such as 25MiB")


# --- the collectives of a method ---


class Booked(NamedTuple):
    """When a message was given to the link, and when it may arrive at the earliest (`time.perf_counter`)."""

    begun: float
    due: float


class Pending:
    """A message under way. `wait` returns when it has arrived, and, on a GPU, when later kernels may use it."""

    def __init__(self, link: Link, work: dist.Work, booked: Booked, is_watched: bool = False) -> None:
        """`is_watched`: the backend says when the message has arrived, which may be before it is waited for."""
        self._link, self._work = link, work
        self._begun, self._due = booked
        self._arrived: float | None = None
        if is_watched:
            work.get_future().add_done_callback(self._note)

    def _note(self, _: object) -> None:
        self._arrived = time.perf_counter()

    def wait(self) -> None:
        """Wait, and count how long."""
        begin = time.perf_counter()
        self._work.wait()
        if self._due > (now := time.perf_counter()):
            time.sleep(self._due - now)
        end = time.perf_counter()
        if not self._link.has_thread:
            self._link.exposed += end - begin
        arrived = min(end, max(self._due, end if self._arrived is None else self._arrived))
        self._link.busy += max(0.0, arrived - max(self._begun, self._link.last))
        self._link.last = max(arrived, self._link.last)


class Link:
    """All ranks, as a method sees them. Every rank makes the same calls in the same order.

    delay            seconds of each message, and of each of its bytes
    messages, bytes  given to collectives by this rank; `wire_bytes`: sent by the ring or tree algorithm in use
    exposed          seconds in which the training waited for messages; `has_thread`: another thread waits for them
    busy             seconds in which at least one was under way
    """

    def __init__(self, world: World, delay: tuple[float, float] | None) -> None:
        self.size, self.rank, self.device = world.size, world.rank, world.device
        self._delay = delay
        # gloo says when an all-reduce has arrived, but not when other collectives have.
        self._is_watched = world.backend == "gloo" and world.device.type == "cpu"
        self.has_thread = False
        self._free = 0.0  # when the delayed link has delivered all messages
        # torch implements reduce-scatter over gloo by an all-reduce, of which each rank keeps its part.
        self._scatter_share = (2 if world.backend == "gloo" else 1) * (world.size - 1) / world.size
        self._host_pairs = world.is_gloo_on_gpu  # gloo does not send GPU tensors between two ranks
        self.messages = self.bytes = 0
        self.wire_bytes = self.exposed = self.busy = self.last = 0.0

    def stats(self) -> dict[str, float]:
        """Counters for the result. No seconds on GPUs, where the host only launches communication."""
        counted = {"messages": float(self.messages), "bytes": float(self.bytes), "wire_bytes": self.wire_bytes}
        if self.device.type == "cuda":
            return counted
        return {
            **counted,
            "communication_seconds": self.busy,
            "exposed_seconds": self.exposed,
            "hidden_seconds": max(0.0, self.busy - self.exposed),
        }

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over ranks, in place."""
        self.start_all_reduce(tensor).wait()
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing `tensor` over ranks, in place."""
        booked = self.book(tensor, 2 * (self.size - 1) / self.size)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return Pending(self, work, booked, self._is_watched)

    def start_reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> Pending:
        """whole [P n] -> this rank's part `own` [n] of the sum over ranks."""
        booked = self.book(whole, self._scatter_share)
        return self._follow(dist.reduce_scatter_tensor(own, whole, async_op=True), booked)

    def start_all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Pending:
        """own [n] of each rank -> whole [P n]."""
        booked = self.book(whole, (self.size - 1) / self.size)
        return self._follow(dist.all_gather_into_tensor(whole, own, async_op=True), booked)

    # --- messages of several tensors, of any types and one dimension --------------------------------------------------

    def sum(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of tensors of one type over ranks, in one message."""
        flat = self.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def gather(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Each rank's tensors, by rank. They are of the same sizes on all ranks."""
        own = _join(tensors)
        whole = own.new_empty(self.size * own.numel())
        booked = self.book(own, self.size - 1)
        self._follow(dist.all_gather_into_tensor(whole, own, async_op=True), booked).wait()
        return [_split(row, tensors) for row in whole.chunk(self.size)]

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rank 0's tensors, of the same sizes on all ranks. Uses a binomial tree: a rank sends once in each round after
        the one in which it received them."""
        message = _join(tensors)
        rounds = range(self.rank.bit_length(), (self.size - 1).bit_length())
        if count := sum(self.rank + 2**number < self.size for number in rounds):
            self.book(message, count)
        dist.broadcast(message, 0)
        return _split(message, tensors)

    def send(self, tensors: Sequence[torch.Tensor], peer: int) -> None:
        """Send tensors to the rank `peer`."""
        message = _join(tensors)
        self.book(message, 1)
        dist.send(message.cpu() if self._host_pairs else message, peer)

    def receive(self, like: Sequence[torch.Tensor], peer: int) -> list[torch.Tensor]:
        """The tensors that the rank `peer` sends, of the sizes and types of `like`."""
        message = torch.empty_like(_join(like), device="cpu" if self._host_pairs else None)
        dist.recv(message, peer)
        return _split(message.to(self.device), like)

    def start_swap(
        self, tensors: Sequence[torch.Tensor], peers: Sequence[int]
    ) -> Callable[[], list[list[torch.Tensor]]]:
        """Start sending tensors, which must not change, to all `peers`. Returns a function that waits for theirs, of
        the same sizes, and returns them in the order of `peers`."""
        message = _join(tensors)
        sent = message.cpu() if self._host_pairs else message
        received = [torch.empty_like(sent) for _ in peers]
        # Receives first: gloo sends data only after the peer's "ready", on the same connection. If that queues behind
        # data, the two directions take turns.
        operations = [dist.P2POp(dist.irecv, place, peer) for peer, place in zip(peers, received, strict=True)]
        operations += [dist.P2POp(dist.isend, sent, peer) for peer in peers]
        booked = [self.book(message, 1) for _ in peers]
        last = Booked(booked[0].begun, booked[-1].due)
        pending = [Pending(self, work, last) for work in dist.batch_isend_irecv(operations)]

        def finish() -> list[list[torch.Tensor]]:
            for each in pending:
                each.wait()
            return [_split(place.to(self.device), tensors) for place in received]

        return finish

    def _follow(self, work: dist.Work | None, booked: Booked) -> Pending:
        assert work is not None
        return Pending(self, work, booked)

    def book(self, tensor: torch.Tensor, factor: float) -> Booked:
        """Count a message that is about to be sent, of which this rank sends `factor` times the size. The delayed link
        carries one message after another."""
        size = tensor.numel() * tensor.element_size()
        self.messages += 1
        self.bytes += size
        self.wire_bytes += factor * size
        now = time.perf_counter()
        if self._delay is None:
            return Booked(now, 0.0)
        self._free = max(self._free, now) + self._delay[0] + self._delay[1] * size
        return Booked(now, self._free)


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all tensors."""
    parts = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _split(message: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `_join`, for tensors of the sizes and types of `like`."""
    pieces = torch.split(message, [part.numel() * part.element_size() for part in like])
    # Viewing bytes as another type requires aligned addresses.
    return [
        (piece.clone() if piece.storage_offset() % part.element_size() else piece).view(part.dtype)
        for piece, part in zip(pieces, like, strict=True)
    ]


# --- methods ---


class Method:
    """Base of all methods: one model per rank, updated by an optimizer after gradients are exchanged.

    name, summary, source, formula    shown by `mlbench methods`; formula: bytes that a rank sends per step
    options       by name; `late_options` delay something by a number of updates: the self-check sets them low
    optimizers    supported optimizers, by their names in torch.optim; empty: any
    identical     all ranks have the same model after every update; otherwise only within `consensus`
    exact         integers arrive as their exact sum, which the self-check verifies
    overflows_apart   gradients of a single rank may overflow, and then all ranks skip the update
    hooks         takes single gradients while the backward pass goes on
    replays       its passes may be replayed as CUDA graphs: it leaves the model's layers and parameters as they are
    settling      updates after which it works as it will, because it measures them first
    gates         a layer's forward pass waits for its own gradients only, so there is no norm of all gradients
    wraps         one of torch's engines wraps or changes the model
    mixed         phases in which messages are sent, so that their time cannot be told from computing
    is_sharded    each rank has only a part of the model
    collective    allreduce, rsag, allgather, gtopk, ps, gossip or none, for predictions
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    formula: ClassVar[str] = RING
    note: ClassVar[str] = ""
    reaches_goals: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Option]] = {}
    late_options: ClassVar[tuple[str, ...]] = ()
    optimizers: ClassVar[tuple[str, ...]] = ()
    identical: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    overflows_apart: ClassVar[bool] = False
    hooks: ClassVar[bool] = False
    replays: ClassVar[bool] = True
    settling: ClassVar[int] = 0
    gates: ClassVar[bool] = False
    wraps: ClassVar[bool] = False
    mixed: ClassVar[tuple[str, ...]] = ()
    is_sharded: ClassVar[bool] = False
    collective: ClassVar[str] = "allreduce"

    keeps_gradients = False  # gradients keep their storage across updates, as CUDA graphs require
    checked: Mapping[str, Any] = MappingProxyType({})  # what the self-check compared, for the result
    optimizer: torch.optim.Optimizer
    model: nn.Module  # as given to `attach`, without any wrapper
    world: World
    link: Link  # all collectives, which it counts

    def __init__(self, **given: str) -> None:
        """`given`: options as text, by name. Raises MethodError."""
        known = self.list_options()
        for name in given:
            if name not in known:
                raise MethodError(f'the method {self.name} has no option "{name}"', f"options: {', '.join(known)}")
        self.given = {name: str(given.get(name, option.default)) for name, option in known.items()}
        self.values = {name: option.read(name, self.given[name]) for name, option in known.items()}
        self.seed = 0

    @classmethod
    def list_options(cls) -> dict[str, Option]:
        """All options by name."""
        return {**cls.options, **({} if cls.wraps else {"delay": DELAY})}

    def check(self, ranks: int) -> None:
        """Raises MethodError if so many ranks cannot use the method with these options."""

    def rounds(self, sent: Sent, ranks: int) -> Sequence[Round]:
        """The collectives of an update, for predictions from a run that counted `sent`."""
        return [Round(self.collective, sent.bytes / max(1.0, sent.messages), sent.messages)]

    # --- what a training calls ----------------------------------------------------------------------------------------

    def attach(
        self, world: World, model: nn.Module, make_optimizer: MakeOptimizer, tracker: Tracker | None = None
    ) -> nn.Module:
        """Give all ranks rank 0's model, which is on its device, and make the optimizer. Returns the module to train.
        Collective."""
        self.world, self.model, self._tracker = world, model, tracker
        self.update = 0
        self._scale: LossScale | None = None
        self._norms = NormWatch(world.device)
        self._updates = 0
        self._distance: float | None = None
        self.share = self.divisor = 1.0
        self.overflowed = False
        if tracker is not None and world.size > 1:
            tracker.mix(self.mixed)
        self.share_model()
        if world.size > 1:
            self.link = Link(world, self.values.get("delay"))
            wrapped = self.wrap(model)
        else:
            wrapped = model
        self.optimizer = self.make_optimizer(make_optimizer)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if world.size > 1:
            found = type(self.optimizer).__name__
            if self.optimizers and found not in self.optimizers:
                raise TaskUsageError(
                    f"{self.name} needs the optimizer {' or '.join(self.optimizers)}; the task has {found}",
                    "another method: mlbench methods",
                )
            self.start()
        return wrapped

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Call before the first forward pass of an update that has `passes` passes. A single one is the last one.

        `weight` is the weight of this rank's gradients (the number of samples that they average), `total` the sum of
        all ranks' weights. If gradients are sums: weight 1, and `total` the number of terms of all ranks. `scale` is
        the loss scale, which is divided out; an overflow skips the update and lowers the scale.
        """
        self.update += 1
        self.share, self._scale = weight / total, scale
        self.divisor = 1.0 if scale is None else scale.value
        self.overflowed = False
        self.is_last_pass = passes == 1

    def begin_last_pass(self) -> None:
        """Call before the last of several passes: gradients may be sent while it runs."""
        self.is_last_pass = True

    def step(self, rate: float, clip: float | None = None) -> bool:
        """Exchange, unscale, clip and update, at learning rate `rate`. False if gradients were not finite: the model is
        unchanged, or, on a GPU without a loss scale, has diverged in one of the last updates (see `is_finite`).

        clip    largest norm of the gradients; infinity: only measure it
        """
        is_alone = self.world.size == 1
        if is_alone:
            self.scale_gradients(self.share)
        else:
            self.enter("communication")
            self.reduce()
        self.enter("optimizer")
        updated = self.apply(rate, clip)
        if not is_alone and type(self).mix is not Method.mix:
            self.enter("communication")
            self.mix(rate)
        self._updates += 1
        return updated

    def is_finite(self) -> bool:
        """Whether all norms of gradients measured so far were finite. Waits for the device."""
        return self._norms.look()

    def consensus(self) -> AbstractContextManager[object]:
        """A context for validation and checkpoints: no messages are in flight, and all ranks have the same model."""
        return NOTHING

    def check_replicas(self) -> float | None:
        """Call within `consensus`, after training. Raises DivergedError if models that must be equal differ. Returns
        the distance between drifting replicas, relative to their norm; None if they do not drift. Collective."""
        if self.world.size == 1:
            return None
        if self.identical:
            replicas.check_identical(self.world, self.model)
        return self._distance

    def whole_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer for a checkpoint: with its state at least on rank 0, of a sharded model with the part of each
        rank. Collective, within `consensus`."""
        return self.optimizer

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on from the state of what `whole_optimizer` gave, which has been loaded from a checkpoint."""

    def stats(self) -> dict[str, float]:
        """Counters of this rank since `attach`, for the result's details: updates, messages, bytes, ..."""
        counted = self.link.stats() if self.world.size > 1 else {"messages": 0.0, "bytes": 0.0}
        distance = {} if self._distance is None else {"distance": self._distance}
        return {"updates": float(self._updates), **counted, **distance}

    def close(self) -> None:
        """End threads and disconnect from servers. Call only after success."""

    # --- what a method overrides --------------------------------------------------------------------------------------

    def share_model(self) -> None:
        """Give all ranks rank 0's model."""
        replicas.broadcast_state(self.world, self.model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap or change the model before the optimizer is created."""
        return model

    def make_optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        """The optimizer of `model`."""
        return make(self.model)

    def start(self) -> None:
        """Create buffers, hooks and state. The optimizer exists, and all ranks have the model."""

    def reduce(self) -> None:
        """After the backward pass: replace the gradients by the weighted mean over all ranks."""

    def update_weights(self, rate: float) -> None:
        """Update the weights from their gradients."""
        set_rate(self.optimizer, rate)
        self.optimizer.step()

    def undo(self) -> None:
        """After an overflow: restore what this update has put into the state."""

    def mix(self, rate: float) -> None:
        """After the update: exchange weights."""

    def take_model(self) -> None:
        """All ranks have loaded the model of a checkpoint: what the method keeps of the weights follows. A rank's own
        state may be loaded afterwards."""

    def own_state(self) -> dict[str, Any]:
        """What only this rank has (residuals, weights, ...), for its file of a checkpoint; empty: nothing."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Resume from what `own_state` gave, with as many ranks. Model and optimizer are those of the checkpoint."""

    def load_other_states(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Resume from the states of another number of ranks; by default all resume from the common model."""

    # --- what methods use ---------------------------------------------------------------------------------------------

    def gradients(self) -> list[torch.Tensor]:
        """Gradients that are not None."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def scale_gradients(self, factor: float) -> None:
        """Multiply this rank's gradients."""
        if factor != 1 and (gradients := self.gradients()):
            torch._foreach_mul_(gradients, factor)

    def read_weights(self) -> torch.Tensor:
        """A copy of this rank's weights, which are of one type, as one flat tensor."""
        with torch.no_grad():
            return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    def write_weights(self, flat: torch.Tensor) -> None:
        """Overwrite this rank's weights."""
        with torch.no_grad():
            replicas.unpack(flat, self.parameters)

    def read_gradients(self) -> torch.Tensor:
        """A copy of this rank's gradients as one flat tensor, zeros for those that are None."""
        parts = [torch.zeros_like(item) if item.grad is None else item.grad for item in self.parameters]
        return torch.cat([part.reshape(-1) for part in parts])

    def write_gradients(self, flat: torch.Tensor) -> None:
        """Overwrite this rank's gradients."""
        parts = torch.split(flat, [item.numel() for item in self.parameters])
        for item, part in zip(self.parameters, parts, strict=True):
            item.grad = part.view_as(item).clone()

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean of all ranks' `tensor`."""
        return self.link.all_reduce(tensor / self.world.size)

    def measure_distance(self) -> None:
        """Measure how far the replicas are from their mean. Collective."""
        self._distance = replicas.measure_distance(self.world, self.parameters)

    def enter(self, category: str) -> str:
        """Count the time from now on as `category`; returns the one before (`clock.Tracker`)."""
        return "other" if self._tracker is None else self._tracker.enter(category)

    def apply(self, rate: float, clip: float | None) -> bool:
        """Unscale, clip and update. False if gradients were not finite."""
        gradients, scale = self.gradients(), self._scale
        if self.divisor != 1 and gradients:
            torch._foreach_mul_(gradients, 1 / self.divisor)
        finite = True
        if clip is not None or scale is not None:
            norm: Any = nn.utils.get_total_norm(gradients)
            if hasattr(norm, "full_tensor"):  # of shards
                norm = norm.full_tensor()
            if clip is not None and math.isfinite(clip):
                nn.utils.clip_grads_with_norm_(self.parameters, clip, norm)
            finite = self._norms.add(norm) if scale is None else math.isfinite(float(norm)) and not self.overflowed
        if scale is not None:
            if self.overflows_apart and self.world.size > 1:
                finite = self.world.max([0.0 if finite else 1.0])[0] == 0
            scale.observe(finite)
        if finite:
            self.update_weights(rate)
        elif self.world.size > 1:
            self.undo()
        if self.keeps_gradients:
            torch._foreach_zero_(gradients)
        else:
            self.optimizer.zero_grad()
        return finite


class Bsp(Method):
    """All gradients are sent after the backward pass, weighted by batch size, so unequal batches are exact.

    Gradients are views into one flat buffer per type, so packing is free unless autograd replaces them. A missing
    gradient counts as zeros.
    """

    name = "bsp"
    summary = "one message with all gradients after the backward pass"
    source = "Valiant 1990; Chen et al. 2016, arXiv:1604.00981"
    exact = True

    def __init__(self, wire: torch.dtype | None = None, **given: str) -> None:
        """`wire`: number format of the messages, if not that of the gradients."""
        super().__init__(**given)
        self._wire = wire

    def start(self) -> None:
        """Create the buffers."""
        self.keeps_gradients = True
        self._buffers: list[torch.Tensor] = []
        self._views: list[tuple[nn.Parameter, torch.Tensor]] = []
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for group in groups.values():
            flat = torch.zeros(sum(item.numel() for item in group), dtype=group[0].dtype, device=group[0].device)
            self._buffers.append(flat)
            for parameter, view in zip(group, make_views(flat, group), strict=True):
                parameter.grad = view
                self._views.append((parameter, view))

    def reduce(self) -> None:
        """Sum the buffers over ranks."""
        for parameter, view in self._views:
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        for flat in self._buffers:
            flat.mul_(self.share)  # before summing, so that half precision does not overflow
            if self._wire is None:
                self.link.all_reduce(flat)
            else:
                flat.copy_(self.link.all_reduce(flat.to(self._wire)))


class Noop(Method):
    """Nothing is sent."""

    name = "noop"
    summary = "no communication: measures the time of a step without it"
    source = "measurement"
    formula = "0"
    note = "Replicas diverge. The exposed communication of a method is its step time minus that of noop."
    reaches_goals = False
    identical = False
    collective = "none"

    def reduce(self) -> None:
        """Only the number of samples is divided out."""
        self.scale_gradients(self.world.size * self.share)

    def check_replicas(self) -> float | None:
        """The distance of the replicas from their mean."""
        if self.world.size > 1:
            self.measure_distance()
        return self._distance


def make_views(flat: torch.Tensor, parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
    """Views of a flat buffer [n], one for each parameter, n elements in all. They have the parameter's own strides,
    which do not follow from its shape with channels-last memory."""
    place = 0
    for parameter in parameters:
        yield flat.as_strided(parameter.size(), parameter.stride(), place)
        place += parameter.numel()


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def prepare_method(world: World, own: Callable[[], Method]) -> Method:
    """The run's method after its self-check, or the task's `own` if the run has none. Collective.

    Raises TaskUsageError for an invalid method, and WrongResultError for one that computes a wrong result.
    """
    if world.contract.method:
        checked: Method = import_module(f"{__package__}.check").read_checked(world)
        return checked
    if world.is_first:
        print("method: the task's own", flush=True)
    return own()
