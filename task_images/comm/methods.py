"""Communication methods as data: axes and their legal combinations. No torch, because the command line imports this.

A method is a point on the axes of `Method`. `check` rejects invalid combinations and suggests the nearest valid one.
`presets` names common points.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
MAX_SERVERS = 64
SCOPED = ("sign", "topk", "randomk")  # codecs with one scale, threshold or selection per compressed part
FEEDBACK_CODECS = ("sign", "topk", "randomk", "qsgd", "powersgd")
GOSSIP_DENSITY = 0.05  # below it, a tenth of the distance remains after 60 exchanges with any step size
NATIVE = ("ddp", "ddp-static", "zero1", "fsdp2", "hsdp")


class MethodError(ValueError):
    """An invalid method. `reason` is a sentence; `instead` is the nearest valid choice as command-line options."""

    def __init__(self, reason: str, instead: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.instead = instead


@dataclass(frozen=True)
class Axis:
    """One axis: what it determines, and the forms of its values."""

    name: str
    help: str
    forms: tuple[str, ...]


AXES = {
    axis.name: axis
    for axis in (
        Axis("plan", "which tensors share a message", ("tensor", "all", "threshold:SIZE", "mgwfbp", "optimal")),
        Axis("partition", "splits messages into parts of at most this size", ("none", "SIZE")),
        Axis("order", "which of the ready messages is sent first", ("fifo", "priority", "deferred")),
        Axis("agreement", "how ranks agree on that order: once, from rank 0's profile, or rank 0 names each next one",
             ("static", "leader")),
        Axis("credit", "bytes in flight at the same time", ("SIZE",)),
        Axis("barrier", "wait for all gradients in each step, or only for those of a layer before its forward pass",
             ("step", "none")),
        Axis("codec", "how a message is compressed",
             ("none", "fp16", "bf16", "sign", "topk:DENSITY", "randomk:DENSITY", "qsgd:LEVELS", "powersgd:RANK")),
        Axis("scope", "unit that a codec compresses: each tensor or a whole message", ("tensor", "message")),
        Axis("warmup", "first updates, with less compression: topk's density falls from 25 %, powersgd starts after "
             "them", ("none", "STEPS")),
        Axis("feedback", "ef: adds what the codec leaves out to the next gradient", ("none", "ef")),
        Axis("momentum", "momentum correction before the codec (deep gradient compression)", ("none", "FACTOR")),
        Axis("selection", "how topk selects elements: exactly, or by a threshold from a sample",
             ("exact", "sampled")),
        Axis("transport", "how messages are combined",
             ("allreduce", "rsag", "allgather", "a2a", "gtopk", "ps", "gossip", "noop")),
        Axis("staleness", "what a parameter server waits for", ("sync", "async", "ssp:BOUND")),
        Axis("servers", "number of parameter servers", ("NUMBER",)),
        Axis("delay", "added delay: seconds per message and per byte", ("none", "ALPHA,BETA")),
        Axis("sync", "how often workers exchange data", ("every", "local:STEPS", "postlocal:START,STEPS")),
        Axis("engine", "mlbench's own reducer, one of torch's, or a registered method's class",
             ("reducer", *NATIVE, "registered")),
        Axis("options", "options of a registered method", ("none", "NAME=NUMBER")),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A point on the axes; each value is a string in one of the axis' forms. `file` is the file with the class of a
    registered method, if given by --method-path."""

    name: str = "bsp"
    plan: str = "threshold:25MiB"
    partition: str = "none"
    order: str = "fifo"
    credit: str = "4MiB"
    barrier: str = "step"
    codec: str = "none"
    feedback: str = "none"
    momentum: str = "none"
    selection: str = "exact"
    transport: str = "allreduce"
    staleness: str = "sync"
    servers: str = "0"
    delay: str = "none"
    sync: str = "every"
    engine: str = "reducer"
    agreement: str = "static"
    scope: str = "tensor"
    warmup: str = "none"
    options: str = "none"
    file: str = "none"

    @property
    def warmup_updates(self) -> int:
        """Number of initial updates in which the codec compresses less."""
        return 0 if self.warmup == "none" else int(self.warmup)

    @property
    def codec_name(self) -> str:
        """The codec without its arguments."""
        return self.codec.partition(":")[0]

    @property
    def server_count(self) -> int:
        """Number of parameter servers."""
        return int(self.servers)

    def axes(self) -> dict[str, str]:
        """Every axis and its value."""
        return {name: value for name, value in asdict(self).items() if name not in ("name", "file")}

    def to_dict(self) -> dict[str, str]:
        """Name and axes. Axes added later are omitted if their value is what runs did before, so that old documents
        stay the same."""
        before = {
            "agreement": "static",
            "warmup": "none",
            "options": "none",
            "file": "none",
            "scope": "message" if self.has_scope else "tensor",
        }
        return {name: value for name, value in asdict(self).items() if before.get(name) != value}

    @property
    def has_scope(self) -> bool:
        """Whether the codec's result depends on compressing per tensor or per message."""
        return self.codec_name in SCOPED

    @classmethod
    def from_dict(cls, document: Mapping[str, str]) -> "Method":
        """The inverse of `to_dict`. Raises MethodError for anything else."""
        known = {item.name for item in fields(cls)}
        for key, value in document.items():
            if key not in known or not isinstance(value, str):
                raise MethodError(f'a method has no axis "{key}" with the value {value!r}')
        method = cls(**document)
        if "scope" not in document and method.has_scope:
            method = replace(method, scope="message")
        check_values(method)
        return method


def parse_size(text: str) -> int:
    """Bytes of a size such as 25MiB or 4096000. Raises ValueError."""
    digits = text.rstrip("BKMGik")
    unit = text[len(digits) :]
    value = float(digits)
    if unit not in UNITS or not 0 < value * UNITS[unit] < 2**50:
        raise ValueError(f"{text} is not a size")
    return int(value * UNITS[unit])


def check_values(method: Method) -> None:
    """Raises MethodError for values that their axis does not allow."""
    for axis in AXES.values():
        value = getattr(method, axis.name)
        if not any(_has_form(value, form) for form in axis.forms):
            raise MethodError(
                f"comm.{axis.name} is {value!r}, not of the form {' or '.join(axis.forms)}",
                f"--set comm.{axis.name}={getattr(Method(), axis.name)}",
            )


def _has_form(value: str, form: str) -> bool:
    word, colon, argument = form.partition(":")
    given, given_colon, given_argument = value.partition(":")
    if not word.isupper():
        return given == word and colon == given_colon and (not colon or _is_valid(argument, given_argument))
    return _is_valid(form, value)


def _is_valid(kind: str, text: str) -> bool:
    """Whether `text` is a valid argument of this kind."""
    try:
        return _KINDS[kind](text)
    except (ValueError, OverflowError):
        return False


def _is_number(text: str, low: int, high: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high


def _is_delay(text: str) -> bool:
    alpha, comma, beta = text.partition(",")
    return bool(comma) and all(0 <= float(part) < 60 for part in (alpha, beta))


def _is_start_and_steps(text: str) -> bool:
    start, comma, steps = text.partition(",")
    return bool(comma) and _is_number(start, 0, 10**9) and _is_number(steps, 1, 10**6)


_KINDS: dict[str, Callable[[str], bool]] = {
    "SIZE": lambda text: parse_size(text) > 0,
    "DENSITY": lambda text: 0 < float(text) <= 1 and math.isfinite(float(text)),
    "LEVELS": lambda text: _is_number(text, 1, 127),
    "RANK": lambda text: _is_number(text, 1, 4096),
    "FACTOR": lambda text: 0 < float(text) < 1,
    "STEPS": lambda text: _is_number(text, 1, 10**6),
    "BOUND": lambda text: _is_number(text, 0, 10**6),
    "START,STEPS": _is_start_and_steps,
    "NUMBER": lambda text: _is_number(text, 0, MAX_SERVERS),
    "ALPHA,BETA": _is_delay,
    "NAME=NUMBER": lambda text: all(math.isfinite(float(part.partition("=")[2])) for part in text.split(",")),
}


@dataclass(frozen=True)
class Rule:
    """What must hold if `when` holds. `reason` says why, `instead` has the changes of axes to the nearest valid
    point."""

    when: Callable[[Method], bool]
    holds: Callable[[Method], bool]
    reason: str
    instead: Mapping[str, str]


TRANSPORTS = {
    "none": ("allreduce", "rsag", "ps", "gossip", "noop"),
    "fp16": ("allreduce", "rsag", "ps", "noop"),
    "bf16": ("allreduce", "rsag", "ps", "noop"),
    "sign": ("allgather", "a2a", "ps"),
    "topk": ("allgather", "gtopk", "gossip", "ps"),
    "randomk": ("allreduce", "ps"),
    "qsgd": ("allgather", "ps"),
    "powersgd": ("allreduce",),
}


PLAIN = {axis: value for axis, value in Method().axes().items() if axis not in ("engine", "options", "delay")}
RULES = (
    Rule(
        lambda m: m.engine in NATIVE,
        lambda m: m.plan.startswith("threshold:") and m.transport == "allreduce" and m.order == "fifo"
        and m.partition == "none" and m.sync == "every" and m.barrier == "step" and m.delay == "none",
        "torch's engines order messages themselves: only plan=threshold:SIZE can be set",
        {"plan": "threshold:25MiB", "transport": "allreduce", "order": "fifo", "partition": "none", "sync": "every",
         "barrier": "step", "delay": "none", "codec": "none", "feedback": "none", "momentum": "none",
         "selection": "exact", "staleness": "sync", "servers": "0"},
    ),
    Rule(
        lambda m: m.engine == "registered",
        lambda m: all(getattr(m, axis) == value for axis, value in PLAIN.items()),
        "a registered method accepts only its own options and the axis delay",
        PLAIN,
    ),
    Rule(
        lambda m: m.options != "none", lambda m: m.engine == "registered", "only registered methods have options",
        {"options": "none"},
    ),
    Rule(
        lambda m: m.engine in NATIVE,
        lambda m: m.codec == "none" or (m.engine == "ddp" and m.codec in ("fp16", "bf16")),
        "of torch's engines, only ddp supports codecs (fp16 and bf16)",
        {"codec": "none", "feedback": "none", "momentum": "none", "selection": "exact"},
    ),
    *(
        Rule(
            lambda m, codec=codec: m.codec_name == codec,  # type: ignore[misc]
            lambda m, carried=carried: m.transport in carried,  # type: ignore[misc]
            f"the codec {codec} needs the transport {' or '.join(carried)}",
            {"transport": carried[0]},
        )
        for codec, carried in TRANSPORTS.items()
    ),
    Rule(
        lambda m: m.staleness != "sync", lambda m: m.transport == "ps",
        "only parameter servers can be asynchronous", {"staleness": "sync"},
    ),
    Rule(
        lambda m: m.staleness != "sync", lambda m: m.codec == "none" and m.barrier == "step" and m.plan == "all",
        "asynchronous servers need whole steps: plan all, barrier step, codec none",
        {"plan": "all", "barrier": "step", "codec": "none"},
    ),
    Rule(
        lambda m: m.transport == "ps", lambda m: m.server_count > 0, "the transport ps needs a parameter server",
        {"servers": "1"},
    ),
    Rule(
        lambda m: m.transport != "ps", lambda m: m.server_count == 0, "only the transport ps uses servers",
        {"servers": "0"},
    ),
    Rule(
        lambda m: m.feedback == "ef", lambda m: m.codec_name in FEEDBACK_CODECS and m.transport != "gossip",
        f"error feedback needs one of the codecs {', '.join(FEEDBACK_CODECS)}, and no gossip", {"feedback": "none"},
    ),
    Rule(
        lambda m: m.transport == "gtopk", lambda m: m.feedback == "ef",
        "gtopk needs error feedback, because its merges drop elements", {"feedback": "ef"},
    ),
    Rule(
        lambda m: m.codec_name == "powersgd", lambda m: m.feedback == "ef" and m.partition == "none",
        "powersgd needs error feedback and whole matrices", {"feedback": "ef", "partition": "none"},
    ),
    Rule(
        lambda m: m.momentum != "none",
        lambda m: m.codec_name == "topk" and m.feedback == "ef" and m.transport in ("allgather", "ps"),
        "momentum correction needs topk with error feedback, over allgather or ps", {"momentum": "none"},
    ),
    Rule(
        lambda m: m.selection == "sampled", lambda m: m.codec_name == "topk", "only topk selects elements",
        {"selection": "exact"},
    ),
    Rule(
        lambda m: m.transport == "a2a", lambda m: m.codec == "sign" and m.feedback == "none",
        "a2a needs the codec sign without error feedback, because it counts votes without scales", {"feedback": "none"},
    ),
    Rule(
        lambda m: m.momentum != "none", lambda m: m.order == "deferred",
        "momentum correction clips all gradients of a rank before it sends them", {"order": "deferred"},
    ),
    Rule(
        lambda m: m.transport == "gtopk", lambda m: m.scope == "message",
        "gtopk compresses whole messages, not tensors", {"scope": "message"},
    ),
    Rule(
        lambda m: m.warmup != "none", lambda m: m.codec_name in ("topk", "powersgd") and m.transport != "gossip",
        "only topk and powersgd have a warm-up, and not with gossip", {"warmup": "none"},
    ),
    Rule(
        lambda m: m.transport == "gossip",
        lambda m: m.plan == "all" and m.barrier == "step" and m.partition == "none"
        and (m.order == "deferred" or (m.order == "fifo" and m.codec == "none")),
        "neighbors exchange whole models: after the step (order deferred), or, uncompressed, during the "
        "backward pass (order fifo)", {"plan": "all", "order": "deferred", "barrier": "step", "partition": "none"},
    ),
    Rule(
        lambda m: m.transport == "gossip" and m.codec_name == "topk",
        lambda m: float(m.codec.partition(":")[2]) >= GOSSIP_DENSITY,
        f"replicas that exchange less than {100 * GOSSIP_DENSITY:g} % of their elements hardly converge",
        {"codec": "topk:0.1"},
    ),
    Rule(
        lambda m: m.sync != "every", lambda m: m.transport == "allreduce" and m.codec == "none" and m.barrier == "step",
        "local steps need transport allreduce, codec none and barrier step",
        {"transport": "allreduce", "codec": "none", "barrier": "step"},
    ),
    Rule(
        lambda m: m.barrier == "none", lambda m: m.codec_name in ("none", "fp16", "bf16"),
        "barrier none supports only the codecs none, fp16 and bf16", {"barrier": "step"},
    ),
    Rule(
        lambda m: m.agreement == "leader",
        lambda m: m.engine == "reducer" and m.order != "deferred" and m.sync == "every"
        and m.transport not in ("ps", "gossip", "noop"),
        "agreement leader needs collectives that start during the backward pass",
        {"agreement": "static"},
    ),
    Rule(lambda m: m.barrier == "none", lambda m: m.order != "deferred",
         "with order deferred, messages wait for the backward pass, so barrier none has no effect", {"order": "fifo"}),
)  # fmt: skip


def check(method: Method, trainers: int | None = None) -> None:
    """Raises MethodError for invalid combinations, also with the number of ranks `trainers` if it is known."""
    check_values(method)
    for rule in RULES:
        if rule.when(method) and not rule.holds(method):
            changes = {axis: value for axis, value in rule.instead.items() if getattr(method, axis) != value}
            raise MethodError(rule.reason, _as_options(method, changes))
    if trainers is None:
        return
    if method.server_count > max(1, trainers):
        raise MethodError(
            f"{method.server_count} servers for {trainers} workers: more servers than workers have no use",
            f"--servers {max(1, trainers)}",
        )
    if method.engine == "hsdp" and (trainers < 4 or trainers % 2):
        raise MethodError(
            f"hsdp needs two groups of ranks: an even number of at least 4, not {trainers}", "--method fsdp2"
        )


def _as_options(method: Method, changes: Mapping[str, str]) -> str:
    """The nearest valid method as command-line options. If the changes break a second rule, its changes are added."""
    changed = replace(method, **changes)
    for _ in RULES:
        broken = next((rule for rule in RULES if rule.when(changed) and not rule.holds(changed)), None)
        if broken is None:
            break
        changed = replace(changed, **broken.instead)
    else:
        return f"--method {method.name}, without further changes"
    all_changes = {axis: value for axis, value in changed.axes().items() if value != getattr(method, axis)}
    return " ".join(f"--set comm.{axis}={value}" for axis, value in all_changes.items())


def count_topk(size: int, density: float) -> int:
    """Number of entries that topk and randomk send of `size` elements."""
    return max(1, int(density * size))


def find_density(density: float, warmup: int, update: int) -> float:
    """The density in update `update`, from 1. During the warm-up it starts at 25 % and is divided by 4 after each fifth
    (Lin et al. 2018, section 3.3: 25, 6.25, 1.5625, 0.4, 0.1 %)."""
    if update > warmup:
        return density
    return max(density, 0.25 ** (1 + 5 * (update - 1) // warmup))


def payload_bytes(method: Method, sizes: Sequence[int]) -> int:
    """Bytes of one rank's message with tensors of `sizes` 4-byte elements, after the warm-up.

    Raises ValueError for powersgd, whose size depends on the shapes.
    """
    word, _, argument = method.codec.partition(":")
    size = sum(sizes)
    parts = [size] if method.scope == "message" else sizes
    if word == "none":
        return 4 * size
    if word in ("fp16", "bf16"):
        return 2 * size
    if word == "sign":
        return -(-size // 8) + (4 * len(parts) if method.feedback == "ef" else 0)
    if word == "topk":
        return 8 * sum(count_topk(part, float(argument)) for part in parts)
    if word == "randomk":
        return 4 * sum(count_topk(part, float(argument)) for part in parts)
    if word == "qsgd":
        return size + 4 * -(-size // 512)
    raise ValueError(f"the messages of {word} depend on shapes")
