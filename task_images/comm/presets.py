"""Named methods as data: axes, bytes sent, source. No torch, because the command line imports this."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from task_images.comm.door import REGISTERED, RegisteredMethod, load_file, load_installed, parse_options
from task_images.comm.methods import AXES, Method, MethodError, check, check_values
from task_images.comm.shipped import SHIPPED


@dataclass(frozen=True)
class Preset:
    """A named method.

    changes    axes that differ from Method's defaults
    bytes      bytes that a rank sends per step, as a formula: M bytes of gradients, d elements, P ranks
    goal       False if training with it is not expected to reach a task's goal; `note` says why
    """

    summary: str
    changes: Mapping[str, str]
    bytes: str
    source: str
    goal: bool = True
    note: str = ""


_NAME = re.compile(r"[a-z][a-z0-9-]{0,40}")
RING = "2 (P-1)/P M"
PRESETS: dict[str, Preset] = {
    "single": Preset("one message after the backward pass", {"plan": "all", "order": "deferred"}, RING, "baseline"),
    "noop": Preset(
        "no communication: measures the time of a step without it", {"transport": "noop"}, "0", "measurement",
        False, "Replicas diverge. The exposed communication of a method is its step time minus that of noop.",
    ),
    "bsp": Preset(
        "one message with all gradients after the backward pass", {"plan": "all", "order": "deferred"}, RING,
        "Valiant 1990; Chen et al. 2016, arXiv:1604.00981",
    ),
    "wfbp": Preset(
        "one message per tensor, as soon as it is ready", {"plan": "tensor"}, RING,
        "Zhang et al. 2017 (Poseidon), arXiv:1706.03292",
    ),
    "fusion": Preset(
        "merges tensors into messages of up to 25 MiB", {"plan": "threshold:25MiB"}, RING,
        "Sergeev and Del Balso 2018, arXiv:1802.05799",
    ),
    "mgwfbp": Preset(
        "merges tensors if that saves more startup time than it costs in waiting (greedy, from measured times)",
        {"plan": "mgwfbp"}, RING, "Shi et al. 2019, arXiv:1811.11141",
    ),
    "optfusion": Preset(
        "the best grouping under mgwfbp's cost model, found by dynamic programming", {"plan": "optimal"}, RING,
        "the cost model of arXiv:1811.11141",
    ),
    "bytescheduler": Preset(
        "splits tensors and sends those of the first layers first; a forward pass waits only for its own layer",
        {"plan": "tensor", "partition": "4MB", "order": "priority", "credit": "16MB", "barrier": "none"}, RING,
        "Peng et al. 2019, SOSP",
    ),
    "dear": Preset(
        "reduce-scatter during the backward pass, all-gather during the next forward pass",
        {"transport": "rsag", "barrier": "none"},
        "2 (P-1)/P M; 3 (P-1)/P M with gloo, whose reduce-scatter is an all-reduce",
        "Zhang et al. 2023, arXiv:2302.12445",
    ),
    "bsp-ps": Preset(
        "parameter servers sum all gradients after the backward pass",
        {"plan": "all", "partition": "4096000", "order": "deferred", "transport": "ps", "servers": "1"}, "M",
        "Li et al. 2014, OSDI",
    ),
    "wfbp-ps": Preset(
        "parameter servers sum each tensor as soon as it is ready",
        {"plan": "tensor", "partition": "4096000", "transport": "ps", "servers": "1"}, "M", "Jiang et al. 2020, OSDI",
    ),
    "bytescheduler-ps": Preset(
        "parameter servers; splits tensors and sends those of the first layers first",
        {"plan": "tensor", "partition": "1MB", "order": "priority", "barrier": "none", "transport": "ps",
         "servers": "1"}, "M", "Peng et al. 2019, SOSP",
    ),
    "async-ps": Preset(
        "each worker updates the weights on the servers at its own pace",
        {"plan": "all", "partition": "4096000", "order": "deferred", "transport": "ps", "servers": "1",
         "staleness": "async"}, "M", "Dean et al. 2012, NeurIPS",
    ),
    "ssp-ps": Preset(
        "like async-ps, but no worker gets more than 2 steps ahead of the slowest",
        {"plan": "all", "partition": "4096000", "order": "deferred", "transport": "ps", "servers": "1",
         "staleness": "ssp:2"}, "M", "Ho et al. 2013, NeurIPS",
    ),
    "fp16": Preset("sends gradients as 16-bit floats", {"codec": "fp16"}, "(P-1)/P M", "common practice"),
    "bf16": Preset("sends gradients as bfloat16", {"codec": "bf16"}, "(P-1)/P M", "common practice"),
    "signsgd-mv": Preset(
        "one sign bit per element; the majority wins, and ties are broken at random",
        {"codec": "sign", "transport": "allgather"},
        "(P-1) ceil(d/8)", "Bernstein et al. 2019, arXiv:1810.05291", False,
        "Every element of an update is +1 or -1, so the learning rate must be far below that of SGD: 0.0001 to 0.0003 "
        "for digits_resnet. The task's optimizer applies its momentum after the vote (Signum).",
    ),
    "ef-signsgd": Preset(
        "one sign bit per element and one scale per tensor, with error feedback",
        {"codec": "sign", "feedback": "ef", "transport": "allgather"}, "(P-1) (ceil(d/8) + 4 per tensor)",
        "Karimireddy et al. 2019, arXiv:1901.09847",
    ),
    "topk": Preset(
        "sends the largest 1 % of each tensor and drops the rest", {"codec": "topk:0.01", "transport": "allgather"},
        "8 k (P-1), k = sum over tensors of max(1, floor(n/100))", "Aji and Heafield 2017, arXiv:1704.05021", False,
        "Without error feedback, most elements are never updated.",
    ),
    "eftopk": Preset(
        "sends the largest 1 % of each tensor and adds the rest to the next gradient (error feedback)",
        {"codec": "topk:0.01", "feedback": "ef", "transport": "allgather"},
        "8 k (P-1), k = sum over tensors of max(1, floor(n/100))",
        "Stich et al. 2018, arXiv:1809.07599",
    ),
    "dgc": Preset(
        "eftopk with momentum correction",
        {"codec": "topk:0.01", "feedback": "ef", "momentum": "0.9", "transport": "allgather", "order": "deferred"},
        "8 k (P-1), k = sum over tensors of max(1, floor(n/100))", "Lin et al. 2018, arXiv:1712.01887", True,
        "The method applies the momentum: that of the task's optimizer is set to 0, and optimizers other than SGD are "
        "rejected. Each rank clips its gradients to 1/sqrt(P) of the limit. With --set comm.warmup=STEPS, the density "
        "falls from 25 % to 1 %.",
    ),
    "gtopk": Preset(
        "the largest 1 % of the summed gradients, merged along a tree",
        {"codec": "topk:0.01", "feedback": "ef", "transport": "gtopk", "scope": "message", "plan": "all",
         "order": "deferred"}, "at most 16 k ceil(log2 P), k = max(1, floor(d/100))",
        "Shi et al. 2019, arXiv:1901.04359",
    ),
    "randomk": Preset(
        "sends a random 10 % of the elements, the same on all ranks, with error feedback",
        {"codec": "randomk:0.1", "feedback": "ef"},
        "8 (P-1)/P k, k = sum over tensors of max(1, floor(n/10))",
        "Stich et al. 2018, arXiv:1809.07599",
    ),
    "qsgd": Preset(
        "quantizes to 127 levels by unbiased random rounding", {"codec": "qsgd:127", "transport": "allgather"},
        "(P-1) (d + 4 ceil(d/512))", "Alistarh et al. 2017, arXiv:1610.02132",
    ),
    "powersgd": Preset(
        "approximates matrices by rank 4, with error feedback and warm start",
        {"codec": "powersgd:4", "feedback": "ef"}, "2 (P-1)/P (4 r (n+m) per n x m matrix, 4 d otherwise)",
        "Vogels et al. 2019, arXiv:1905.13727",
    ),
    "localsgd": Preset(
        "workers train independently and average their weights every 4 steps", {"sync": "local:4"},
        "2 (P-1)/P M / 4", "Stich 2019, arXiv:1805.09767",
    ),
    "postlocalsgd": Preset(
        "averages gradients for 100 steps, then works like localsgd", {"sync": "postlocal:100,4"},
        "2 (P-1)/P M, after 100 steps a quarter of it", "Lin et al. 2020, arXiv:1808.07217",
    ),
    "dpsgd": Preset(
        "averages weights with both neighbors on a ring while gradients are computed",
        {"plan": "all", "transport": "gossip"}, "2 M (M with two ranks)", "Lian et al. 2017, arXiv:1705.09056",
    ),
    "dpsgd-atc": Preset(
        "averages weights with both neighbors on a ring after each step (adapt, then combine)",
        {"plan": "all", "order": "deferred", "transport": "gossip"}, "2 M (M with two ranks)",
        "Cattivelli and Sayed 2010, doi:10.1109/TSP.2009.2033729",
    ),
    "choco": Preset(
        "like dpsgd-atc, but sends only the largest 10 % of the changes",
        {"plan": "all", "order": "deferred", "transport": "gossip", "codec": "topk:0.1"},
        "16 k, k = sum over tensors of max(1, floor(n/10))", "Koloskova et al. 2019, arXiv:1902.00340",
    ),
    "ddp": Preset("torch's DistributedDataParallel", {"engine": "ddp"}, RING, "Li et al. 2020, arXiv:2006.15704"),
    "ddp-static": Preset(
        "DistributedDataParallel with a static graph", {"engine": "ddp-static"}, RING, "arXiv:2006.15704"
    ),
    "zero1": Preset(
        "shards the optimizer state across ranks (torch's ZeroRedundancyOptimizer)", {"engine": "zero1"},
        "2 (P-1)/P M + (P-1)/P M on average over all ranks", "Rajbhandari et al. 2020, arXiv:1910.02054",
    ),
    "fsdp2": Preset(
        "shards parameters, gradients and optimizer state across ranks (torch's fully_shard)", {"engine": "fsdp2"},
        "3 (P-1)/P M; 4 (P-1)/P M with gloo, whose reduce-scatter is an all-reduce",
        "Zhao et al. 2023, arXiv:2304.11277",
    ),
    "hsdp": Preset(
        "fsdp2 within each node or half of the ranks, all-reduce between these groups", {"engine": "hsdp"},
        "3 (1-G/P) M + 2 (G-1)/P M with G groups; with gloo 4 (1-G/P) M + 2 (G-1)/P M",
        "Zhao et al. 2023, arXiv:2304.11277",
    ),
}  # fmt: skip


def register(method: RegisteredMethod, file: str = "none") -> None:
    """Add a custom method to the presets. Raises MethodError if the name is in use."""
    if not _NAME.fullmatch(method.name) or set(method.options) & {*AXES, "name", "file"}:
        raise MethodError(f"the method {method.name!r} or one of its options has a name that cannot be used")
    known = REGISTERED.get(method.name)
    if method.name in PRESETS and (known is None or PRESETS[method.name].changes.get("file", "none") != file):
        raise MethodError(f'there is a method "{method.name}" already; give yours another name')
    REGISTERED[method.name] = method
    PRESETS[method.name] = Preset(
        method.summary,
        {"engine": "registered", "options": parse_options(method, {}), "file": file},
        method.formula,
        method.source,
        method.reaches_goals,
        method.note,
    )


def register_installed(name: str = "") -> None:
    """Register the methods of installed packages: the one named `name`, or all. Raises MethodError."""
    for method in load_installed(name):
        register(method)


def find_registered(method: Method) -> RegisteredMethod:
    """The class of a registered method, on a rank or in the command line. Raises MethodError if there is none."""
    if method.name not in REGISTERED:
        if method.file != "none":
            register(load_file(method.file), method.file)
        else:
            register_installed(method.name)
    if method.name not in REGISTERED:
        raise MethodError(f"the method {method.name} is not installed here", "pip install its package on every machine")
    return REGISTERED[method.name]


def resolve(name: str, changes: Mapping[str, str] | None = None) -> Method:
    """The preset `name` with changed axes. Raises MethodError for unknown names and invalid values."""
    if name not in PRESETS:
        register_installed(name)
    if name not in PRESETS:
        raise MethodError(f'there is no method "{name}"')
    changes, registered = dict(changes or {}), REGISTERED.get(name)
    own = {} if registered is None else {key: changes.pop(key) for key in list(changes) if key in registered.options}
    for axis in changes:
        if axis not in AXES:
            names = [*AXES, *(registered.options if registered else ())]
            raise MethodError(f'a method has no axis "{axis}"', f"axes: {', '.join(names)}")
    if registered is not None and own:
        changes["options"] = parse_options(registered, own)
    method = Method(name=name, **{**PRESETS[name].changes, **changes})
    check_values(method)
    return method


def list_companions(name: str) -> dict[str, list[str]]:
    """The legal changes of a preset: for each axis with named values, the other values that are valid with it."""
    method = resolve(name)
    found = {}
    for axis in AXES.values():
        samples = [_EXAMPLES.get(form, form) for form in axis.forms]
        legal = []
        for value in samples:
            if value == getattr(method, axis.name) or value.isupper():
                continue
            try:
                check(replace(method, **{axis.name: value}))
            except MethodError:
                continue
            legal.append(next(form for form, sample in zip(axis.forms, samples, strict=True) if sample == value))
        if legal:
            found[axis.name] = legal
    return found


_EXAMPLES = {
    "threshold:SIZE": "threshold:1MiB", "SIZE": "1MiB", "topk:DENSITY": "topk:0.5", "randomk:DENSITY": "randomk:0.5",
    "qsgd:LEVELS": "qsgd:7", "powersgd:RANK": "powersgd:2", "FACTOR": "0.9", "ssp:BOUND": "ssp:3", "NUMBER": "2",
    "ALPHA,BETA": "0.001,1e-9", "NAME=NUMBER": "a=1", "STEPS": "10", "local:STEPS": "local:2",
    "postlocal:START,STEPS": "postlocal:1,2",
}  # fmt: skip

for _shipped in SHIPPED:
    register(_shipped())
