"""A training step under a communication method: when each message starts and ends, and what the step takes.

A method is a point on the axes of task_images/comm/methods.py, the same that a run uses; its plans are built by the
same functions. All-reduces are handed over without waiting, so that gloo's two threads carry two at a time; messages of
other transports travel one at a time.
"""

import itertools
import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush

from mlbench_cli.errors import UsageError
from mlbench_cli.simulator.collectives import Collectives
from mlbench_cli.simulator.gloo import WORKER_THREADS, Message
from mlbench_cli.simulator.workload import CodecCost, Workload
from task_images.comm.door import read_options
from task_images.comm.methods import Method, parse_size, payload_bytes
from task_images.comm.plans import Cost, Groups, build, fit, simulate_order
from task_images.comm.presets import PRESETS, find_registered, resolve

STEPS = 4  # that are simulated; without a barrier the last one is in its steady state
SLOWDOWNS = 3  # rounds in which computation slows for messages beside it, and messages move with it
MAX_ROUNDING = 0.01  # of all bytes: buffers may be padded
POWER_MIN_RATE = 2  # matrices that powersgd does not make smaller by this travel as they are
_COST_SIZES = (4096, 65_536, 262_144, 1 << 20)  # of the all-reduces that a run times, see comm/reducer.py
_BURSTS = (2, 4)  # all-reduces handed over at once; a run compares 2 with 12, see comm/link.py
UNKNOWN_ENGINES = ("zero1", "fsdp2", "hsdp")


@dataclass(frozen=True)
class Sent:
    """One message of a step: number of its group, when it was ready, started and ended, its bytes on the wire."""

    group: int
    ready: float
    start: float
    end: float
    size: float


@dataclass(frozen=True)
class Step:
    """What a step takes. `exposed` is the part of its seconds that it would not take without communication."""

    seconds: float
    compute: float
    communication: float
    messages: int
    sent_bytes: float  # of one rank, payload
    groups: int
    trace: tuple[Sent, ...] = field(default=(), repr=False)

    @property
    def exposed(self) -> float:
        """Seconds of communication that no computation hides."""
        return max(0.0, self.seconds - self.compute)

    @property
    def hidden(self) -> float:
        """Seconds in which messages are under way while the rank computes."""
        return max(0.0, self.communication - self.exposed)

    @property
    def efficiency(self) -> float:
        """The share of the step that is computation; 1.0 if nothing else takes time."""
        return self.compute / self.seconds if self.seconds else 1.0


def simulate_step(
    workload: Workload,
    method: Method,
    collectives: Collectives,
    servers: int | None = None,
    buckets: Sequence[int] = (),
) -> Step:
    """The step of a rank in its steady state. Raises UsageError for a method that is not simulated.

    `buckets` are the bytes of the groups that a run with this method had; without them its plan is made here.
    What is computed beside messages is slowed by the workload's `overlap`, which moves the messages in turn.
    """
    check_method(method)
    step = _simulate(workload, method, collectives, servers, buckets)
    if workload.overlap == 0 or workload.seconds == 0:
        return step
    for _ in range(SLOWDOWNS):
        factor = 1 + workload.overlap * step.hidden / workload.seconds
        step = _simulate(workload.scale(factor), method, collectives, servers, buckets)
    return replace(step, compute=workload.seconds)


def _simulate(
    workload: Workload, method: Method, collectives: Collectives, servers: int | None, buckets: Sequence[int]
) -> Step:
    ranks = collectives.ranks
    if ranks == 1 or method.transport == "noop":
        return Step(workload.seconds, workload.seconds, 0.0, 0, 0.0, 0)
    if method.engine == "registered":
        return _registered_step(workload, method, collectives)
    word, _, argument = method.sync.partition(":")
    if word != "every":
        # Means over many steps: one in `every` ends with an average of all parameters.
        every = int(argument.split(",")[-1])
        exchange = collectives.all_reduce(workload.size)
        sent = 2 * (collectives.ranks - 1) / collectives.ranks * workload.size / every
        seconds = workload.seconds + exchange / every
        return Step(seconds, workload.seconds, exchange / every, 1, sent, 1)
    wire = _Wire(
        method, collectives, servers or max(1, method.server_count), find_codec_seconds(workload, method, ranks)
    )
    groups = group_by_bytes(workload, buckets) or plan_groups(workload, method, measure_cost(collectives))
    parts = _divide(workload, groups, method)
    if method.staleness == "async":
        return _asynchronous_step(workload, parts, wire)
    if method.barrier == "none":
        return _gated_step(workload, method, parts, wire, collectives)
    # All messages end before the update, and the update before the next step.
    deferred = method.order == "deferred"
    if method.transport == "gossip" and not deferred:
        return _parallel_gossip(workload, parts, wire)
    ready = [workload.backward if deferred else part.ready for part in parts]
    if method.transport == "allreduce" and method.codec_name != "powersgd":
        starts, ends = _overlap(method, parts, wire, ready, collectives)
    elif method.transport == "ps":
        starts, ends = _pipeline([(at, *wire.both_ways(part)) for at, part in zip(ready, parts, strict=True)])
    else:
        order = range(len(parts)) if method.order != "priority" else None
        starts, ends = _one_at_a_time(ready, [wire.message(part) for part in parts], parts, order)
    last = max([workload.backward, *ends])
    return _collect(workload, last + workload.optimizer + workload.other, parts, starts, ends, wire, ready)


def check_method(method: Method) -> None:
    """Raises UsageError for what this simulator has no model of."""
    if method.engine in UNKNOWN_ENGINES:
        raise UsageError(f"{method.engine} is not simulated: when its messages block the forward pass is not modeled.")
    if method.staleness.startswith("ssp"):
        raise UsageError("Bounded staleness is not simulated: it depends on how far workers drift apart.")


def plan_groups(workload: Workload, method: Method, cost: Cost) -> Groups:
    """The groups of tensors that share a message, by the functions that a run uses."""
    sizes = [tensor.size for tensor in workload.tensors]
    ready = [tensor.ready for tensor in workload.tensors]
    return build(method.plan, sizes, ready, cost)


def group_by_bytes(workload: Workload, buckets: Sequence[int]) -> Groups:
    """Groups of tensors, in the order in which they are ready, that have the given bytes; none if they do not fit."""
    if not buckets or abs(sum(buckets) - workload.size) > MAX_ROUNDING * workload.size:
        return []
    ends, done = list(itertools.accumulate(buckets)), 0.0
    groups: Groups = [[] for _ in buckets]
    for index, tensor in enumerate(workload.tensors):
        middle = done + tensor.size / 2
        groups[min(bisect(ends, middle), len(groups) - 1)].append(index)
        done += tensor.size
    return [group for group in groups if group]


@lru_cache(64)
def measure_cost(collectives: Collectives) -> Cost:
    """alpha and beta as a run finds them before it makes its plan, whatever carries its messages.

    It counts by how much a burst of all-reduces ends later for one more: less than one takes alone if the backend
    carries several at a time.
    """

    def last_end(size: float, count: int) -> float:
        return collectives.finish([Message(0.0, size)] * count, WORKER_THREADS)[-1]

    few, many = _BURSTS
    return fit([(size, (last_end(size, many) - last_end(size, few)) / (many - few)) for size in _COST_SIZES])


def encoded_bytes(method: Method, sizes: Sequence[int], rows: Sequence[int] = ()) -> float:
    """Bytes of a message of tensors of `sizes` bytes of fp32 and so many `rows` after the method's codec."""
    if method.codec_name == "powersgd":
        return sum(factor_bytes(method, sizes, rows))
    if method.codec in ("none", "fp16", "bf16"):
        return sum(sizes) / (1 if method.codec == "none" else 2)
    return payload_bytes(method, [max(1, round(size / 4)) for size in sizes])


def factor_bytes(method: Method, sizes: Sequence[int], rows: Sequence[int] = ()) -> tuple[float, float]:
    """Bytes of powersgd's two rounds: left factors with what is not compressed, then right factors.

    The rule is that of comm/exchange.py. Without `rows`, or where they are 0, a tensor counts as a square matrix.
    """
    rank = float(method.codec.partition(":")[2])
    first = second = 0.0
    for size, given in zip(sizes, rows or [0] * len(sizes), strict=True):
        numbers = size / 4
        height = given or math.sqrt(numbers)
        columns = numbers / height
        width = min(rank, height, columns)
        is_exact = width == min(height, columns) > 1
        if (height + columns) * width * POWER_MIN_RATE < numbers or is_exact:
            first, second = first + 4 * width * height, second + 4 * width * columns
        else:
            first += size
    return first, second


def find_codec_seconds(workload: Workload, method: Method, ranks: int) -> tuple[float, float]:
    """Seconds per byte of gradients that a method computes before and after its messages, on so many ranks.

    Those of the preset, else of another one with the same codec; 0 if none was measured.
    """
    before, after = _find_codec_cost(workload.codecs, method, ranks)
    return workload.codec_factor * before, workload.codec_factor * after


@lru_cache(maxsize=4096)
def _find_codec_cost(codecs: tuple[CodecCost, ...], method: Method, ranks: int) -> tuple[float, float]:
    if method.engine == "registered":
        rows = [row for row in codecs if row.method == method.name]
    else:
        alike = [row for row in codecs if row.method in PRESETS and _has_codec_of(resolve(row.method), method)]
        names = [row.method for row in alike]
        chosen = method.name if method.name in names else names[0] if names else ""
        rows = [row for row in alike if row.method == chosen]
    if not rows:
        return 0.0, 0.0
    few, many = min(rows, key=lambda row: row.ranks), max(rows, key=lambda row: row.ranks)
    more = (ranks - few.ranks) / max(1, many.ranks - few.ranks)
    before, after = (
        low + max(0.0, high - low) * more for low, high in ((few.before, many.before), (few.after, many.after))
    )
    return max(0.0, before), max(0.0, after)  # on fewer ranks than measured


def _has_codec_of(preset: Method, method: Method) -> bool:
    return preset.codec != "none" and preset.codec_name == method.codec_name and preset.engine == method.engine


@dataclass(frozen=True)
class _Part:
    group: int
    sizes: tuple[int, ...]  # bytes of the tensors, or of their parts, in the message
    ready: float
    position: int  # of the first of its tensors in the forward pass: its priority
    last: int  # of the last one; the forward pass waits for it at all from `position` to here
    rows: tuple[int, ...] = ()  # of the tensors; empty if one is cut

    @property
    def size(self) -> int:
        """Bytes of its gradients."""
        return sum(self.sizes)


class _Wire:
    """Seconds and bytes of one message of a method. `codec`: seconds per byte of gradients before and after it."""

    def __init__(
        self, method: Method, collectives: Collectives, servers: int, codec: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self._method, self._collectives, self._servers, self._codec = method, collectives, servers, codec

    def encode(self, part: _Part) -> float:
        """Seconds that a rank computes before a message leaves."""
        return self._codec[0] * part.size

    def decode(self, part: _Part) -> float:
        """Seconds that a rank computes when the sum has come."""
        return self._codec[1] * part.size

    def message(self, part: _Part) -> float:
        """Seconds of a message, and of what the thread that sends it computes."""
        return self.encode(part) + self._travel(part) + self.decode(part)

    def _travel(self, part: _Part) -> float:
        collectives, ranks = self._collectives, self._collectives.ranks
        if self._method.codec_name == "powersgd":  # the second round needs the sum of the first
            rounds = factor_bytes(self._method, part.sizes, part.rows)
            return sum(collectives.all_reduce(size) for size in rounds if size)
        payload = encoded_bytes(self._method, part.sizes)
        transport = self._method.transport
        if transport == "allgather":
            return collectives.all_gather(payload * ranks)
        if transport == "a2a":
            return 2 * collectives.all_gather(payload)
        if transport == "gtopk":
            return 2 * math.ceil(math.log2(ranks)) * collectives.transfer(payload)
        if transport == "gossip":
            return collectives.transfer(self._neighbors * payload)
        if transport == "ps":
            push, pull, latency = self.both_ways(part)
            return push + pull + 2 * latency
        if transport == "rsag":
            return collectives.reduce_scatter(payload) + collectives.all_gather(payload)
        return collectives.all_reduce(payload)

    def both_ways(self, part: _Part, at_once: int | None = None) -> tuple[float, float, float]:
        """Seconds that a message occupies links to parameter servers and back from them, and the one-way latency.

        `at_once` workers share the servers' links, by default all of them. Servers return the sum in its shortest exact
        form (task_images/comm/served_codecs.py).
        """
        ranks = self._collectives.ranks
        share = max(1.0, (at_once or ranks) / self._servers)
        size = float(part.size)
        pushed = pulled = encoded_bytes(self._method, part.sizes)
        if self._method.codec_name == "topk":  # the entries of all workers, if they chose different ones
            pulled = min(2 * size, ranks * pushed)
        elif self._method.codec_name == "qsgd" or (self._method.codec_name, self._method.feedback) == ("sign", "ef"):
            pulled = size
        push, latency = self._collectives.stream(pushed * share)
        return push, self._collectives.stream(pulled * share)[0], latency

    def sent_bytes(self, part: _Part) -> float:
        """Bytes that a rank sends for a message."""
        ranks = self._collectives.ranks
        payload = encoded_bytes(self._method, part.sizes, part.rows)
        transport = self._method.transport
        if transport == "allgather":
            return (ranks - 1) * payload
        if transport == "gtopk":
            return 2 * math.ceil(math.log2(ranks)) * payload
        if transport == "gossip":
            return self._neighbors * payload
        if transport == "rsag":
            return (self._collectives.scatter_share + (ranks - 1) / ranks) * payload
        return payload if transport == "ps" else 2 * (ranks - 1) / ranks * payload

    @property
    def _neighbors(self) -> int:
        """On a ring: all of them get this rank's weights over its one link."""
        return min(2, self._collectives.ranks - 1)


def _divide(workload: Workload, groups: Groups, method: Method) -> list[_Part]:
    """The messages of a step, in the order in which they are ready."""
    limit = None if method.partition == "none" else parse_size(method.partition)
    count, parts = len(workload.tensors), []
    for number, group in enumerate(groups):
        size = sum(workload.tensors[index].size for index in group)
        ready = workload.tensors[group[-1]].ready
        position, last = count - 1 - group[-1], count - 1 - group[0]
        room, cut = limit or size, []
        for index in group:
            left = workload.tensors[index].size
            while left > 0:
                piece = min(left, room)
                cut.append(piece)
                left, room = left - piece, room - piece
                if not room and limit:
                    parts.append(_Part(number, tuple(cut), ready, position, last))
                    room, cut = limit, []
        if cut:
            rows = () if limit else tuple(workload.tensors[index].rows for index in group)
            parts.append(_Part(number, tuple(cut), ready, position, last, rows))
    return parts


def _parallel_gossip(workload: Workload, parts: Sequence[_Part], wire: _Wire) -> Step:
    """Weights leave before the forward pass, and are mixed behind the update that was computed meanwhile."""
    ready = [0.0] * len(parts)
    starts, ends = _one_at_a_time(ready, [wire.message(part) for part in parts], parts, range(len(parts)))
    seconds = max(workload.backward + workload.optimizer, *ends) + workload.other
    return _collect(workload, seconds, parts, starts, ends, wire, ready)


def _overlap(
    method: Method, parts: Sequence[_Part], wire: "_Wire", ready: Sequence[float], collectives: Collectives
) -> tuple[list[float], list[float]]:
    """Starts and ends of all-reduces in the method's order, as many at a time as the backend has threads for.

    A start is when a message was handed over; it shares the link with those before it.
    """
    order = list(range(len(parts)))
    if method.order == "priority":
        order = _agree_on_order(parts, ready, collectives)
    messages, encoded = [], 0.0  # one thread encodes them, one after the other
    for number in order:
        encoded = max(encoded, ready[number]) + wire.encode(parts[number])
        messages.append(Message(encoded, encoded_bytes(method, parts[number].sizes)))
    found = collectives.finish(messages, WORKER_THREADS)
    ends, starts = [0.0] * len(parts), [0.0] * len(parts)
    busy: list[float] = []
    for number, end in zip(order, found, strict=True):
        free = heappop(busy) if len(busy) == WORKER_THREADS else 0.0
        starts[number], ends[number] = max(ready[number], free), end + wire.decode(parts[number])
        heappush(busy, end)
    return starts, ends


def _agree_on_order(parts: Sequence[_Part], ready: Sequence[float], collectives: Collectives) -> list[int]:
    """The fixed order that a run makes for its priorities."""
    first = min(ready, default=0.0)
    times, priorities = [at - first for at in ready], [part.position for part in parts]
    return simulate_order([part.size for part in parts], times, priorities, measure_cost(collectives))


def _one_at_a_time(
    ready: Sequence[float],
    seconds: Sequence[float],
    parts: Sequence[_Part],
    order: Sequence[int] | None,
    free: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Starts and ends of messages on one link: in a given order, or always the ready one of the least position."""
    starts, ends = [0.0] * len(ready), [0.0] * len(ready)
    if order is not None:
        for number in order:
            starts[number] = max(free, ready[number])
            free = ends[number] = starts[number] + seconds[number]
        return starts, ends
    coming = sorted(range(len(ready)), key=lambda number: ready[number])
    waiting: list[tuple[int, int]] = []
    index = 0
    while index < len(coming) or waiting:
        if not waiting:
            free = max(free, ready[coming[index]])
        while index < len(coming) and ready[coming[index]] <= free:
            heappush(waiting, (parts[coming[index]].position, coming[index]))
            index += 1
        _, number = heappop(waiting)
        starts[number] = free
        free = ends[number] = free + seconds[number]
    return starts, ends


def _pipeline(
    transfers: Sequence[tuple[float, float, float, float]], free: float = 0.0
) -> tuple[list[float], list[float]]:
    """Starts and ends of messages that are pushed to servers and pulled from them, both directions at once.

    Each of `transfers` is when it is ready, the seconds for which it occupies links on its way to a server and on its
    way back, and the latency of each way, which messages that follow each other share.
    """
    starts, ends, pulled = [], [], 0.0
    for ready, push, pull, latency in transfers:
        start = max(free, ready)
        free = start + push
        pulled = max(pulled, free + latency) + pull
        starts.append(start)
        ends.append(pulled + latency)
    return starts, ends


def _gated_step(
    workload: Workload, method: Method, parts: Sequence[_Part], wire: _Wire, collectives: Collectives
) -> Step:
    """Without a barrier: each layer's next forward pass waits for its own parameters only."""
    count = len(workload.tensors)
    backward = [
        max(0.0, later - earlier)
        for earlier, later in itertools.pairwise([workload.forward, *(tensor.ready for tensor in workload.tensors)])
    ]
    total = sum(backward) or 1.0
    forward = [workload.forward * share / total for share in reversed(backward)]  # in the order of the forward pass
    usable, begin, free, starts_of_steps = [0.0] * count, 0.0, 0.0, []
    starts: list[float] = []
    ends: list[float] = []
    ready: list[float] = []
    for _ in range(STEPS):
        starts_of_steps.append(begin)
        now = begin + workload.other
        for position in range(count):
            now = max(now, usable[position]) + forward[position]
        offset = now - workload.forward
        ready = [part.ready + offset for part in parts]
        starts, ends, updated = _exchange(method, parts, wire, ready, free, collectives)
        free = max(ends, default=0.0)
        end = workload.backward + offset
        for part, done in zip(parts, updated, strict=True):
            for position in range(part.position, part.last + 1):
                usable[position] = max(usable[position], done)
        begin = end + workload.optimizer
    seconds = starts_of_steps[-1] - starts_of_steps[-2]
    return _collect(workload, max(seconds, 0.0), parts, starts, ends, wire, ready)


def _exchange(
    method: Method,
    parts: Sequence[_Part],
    wire: _Wire,
    ready: Sequence[float],
    free: float,
    collectives: Collectives,
) -> tuple[list[float], list[float], list[float]]:
    """Starts, ends, and when parameters are complete, of a step's messages."""
    if method.transport == "ps":
        order = sorted(range(len(parts)), key=lambda number: (ready[number], parts[number].position))
        if method.order == "priority":
            order = _agree_on_order(parts, ready, collectives)
        starts, ends = _pipeline([(ready[number], *wire.both_ways(parts[number])) for number in order], free)
        back = dict(zip(order, zip(starts, ends, strict=True), strict=True))
        pairs = [back[number] for number in range(len(parts))]
        return [start for start, _ in pairs], [end for _, end in pairs], [end for _, end in pairs]
    if method.transport == "rsag":
        return _scatter_then_gather(parts, wire, ready, free)
    if method.transport == "allreduce":
        starts, ends = _overlap(method, parts, wire, ready, collectives)
        return starts, ends, ends
    seconds = [wire.message(part) for part in parts]
    in_turn = None if method.order == "priority" else range(len(parts))
    starts, ends = _one_at_a_time(ready, seconds, parts, in_turn, free)
    return starts, ends, ends


def _scatter_then_gather(
    parts: Sequence[_Part], wire: _Wire, ready: Sequence[float], free: float
) -> tuple[list[float], list[float], list[float]]:
    """DeAR: all reduce-scatters in the backward pass, then the all-gathers in the order of the next forward pass."""
    halves = [wire.message(part) / 2 for part in parts]
    starts, scattered = _one_at_a_time(ready, halves, parts, range(len(parts)), free)
    begun = [max(scattered, default=0.0)] * len(parts)
    _, ends = _one_at_a_time(begun, halves, parts, None, begun[0] if begun else 0.0)
    return starts, ends, ends


def _asynchronous_step(workload: Workload, parts: Sequence[_Part], wire: _Wire) -> Step:
    """Workers are out of step, because servers take their first changes in turn (comm/server.py), so a step takes as
    long as a worker's alone; unless the servers' links, which carry the messages of all workers in the meantime, are
    the bottleneck."""
    ready = [workload.backward] * len(parts)
    starts, ends = _pipeline([(workload.backward, *wire.both_ways(part, 1)) for part in parts])
    alone = max([workload.backward, *ends]) + workload.optimizer + workload.other
    pushes, pulls, _ = zip(*map(wire.both_ways, parts), strict=True) if parts else ((), (), ())
    return _collect(workload, max(alone, sum(pushes), sum(pulls)), parts, starts, ends, wire, ready)


def _registered_step(workload: Workload, method: Method, collectives: Collectives) -> Step:
    """The mean over steps; the rounds of a method that came through the door follow its backward pass in turn."""
    numbers = sum(tensor.size for tensor in workload.tensors) // 4
    rounds = find_registered(method).rounds(numbers, read_options(method.options))
    seconds = sent = 0.0
    for each in rounds:
        payload, ranks = each.size, collectives.ranks
        if each.kind == "allgather":
            seconds += collectives.all_gather(payload * ranks) / each.every
            sent += (ranks - 1) * payload / each.every
        else:
            seconds += collectives.all_reduce(payload) / each.every
            sent += 2 * (ranks - 1) / ranks * payload / each.every
    seconds += sum(find_codec_seconds(workload, method, collectives.ranks)) * workload.size
    return Step(workload.seconds + seconds, workload.seconds, seconds, len(rounds), sent, len(rounds))


def _collect(
    workload: Workload,
    seconds: float,
    parts: Sequence[_Part],
    starts: Sequence[float],
    ends: Sequence[float],
    wire: _Wire,
    ready: Sequence[float],
) -> Step:
    rows = zip(parts, ready, starts, ends, strict=True)
    trace = tuple(Sent(part.group, at, start, end, part.size) for part, at, start, end in rows)
    busy = _join(starts, ends)
    sent_bytes = sum(wire.sent_bytes(part) for part in parts)
    return Step(seconds, workload.seconds, busy, len(parts), sent_bytes, len({part.group for part in parts}), trace)


def _join(starts: Sequence[float], ends: Sequence[float]) -> float:
    """Seconds in which at least one message was under way."""
    total, until = 0.0, -math.inf
    for start, end in sorted(zip(starts, ends, strict=True)):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
