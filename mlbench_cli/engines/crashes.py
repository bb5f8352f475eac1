"""Explain a failed process by its exit code and the last lines of its log; shared by all engines."""

import re
import signal
from collections.abc import Mapping, Sequence

from mlbench_cli.model.run import Finding
from mlbench_cli.util.text import size, without_colors
from task_images import contract

EVIDENCE_WIDTH = 300
# Patterns are compiled when a rank has crashed, which few do: all of them take 2 ms.
GPU_MEMORY = (
    r"(?i)\b(CUDA|HIP)( driver)?( error:?| failure \d+)? '?out of memory|torch\.(cuda\.)?OutOfMemoryError"
    r"|(CU|HIP)(BLAS|DNN)_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory"
)
# Of NVIDIA's and AMD's drivers and container tools, and of torch. CUDA's error 802: the fabric manager does not run.
DRIVER = (
    r"CUDA driver version is insufficient|NVIDIA driver on your system is too old"
    r"|driver/library version mismatch|nvidia-container-cli: \w+ error|unresolvable CDI devices"
    r"|forward compatibility was attempted|unsupported display driver / cuda driver"
    r"|HIP driver version is insufficient|/dev/kfd: (No such file|Permission denied)"
)
GPU_FAULT = (
    r"\bXid\b|uncorrectable (ECC|NVLink)|GPU has fallen off the bus|(CUDA|HIP) error: (unspecified launch|an illegal)"
    r"|system not yet initialized|Memory access fault by GPU node|HW Exception by GPU node|amdgpu: GPU reset"
)
INTERFACE = r"(?i)Unable to find (?:address|interface) for: ?(\S+)|ifname (\S+) not found|no socket interface found"
# What the training tasks need; older ones lack fp32_precision.
OLDEST_TORCH = (2, 9)
# Code, pattern, summary with `who` and what the pattern has found, and what to do.
PLAIN_CAUSES = (
    (
        "no_gpu",
        r"No (?:CUDA|HIP) GPUs are available|no NVIDIA driver|no GPUs found!|no CUDA-capable device"
        r"|not compiled with CUDA enabled",
        "{who} found no GPU that its program can use.",
        "--gpu gives each rank one. If the run has it: nvidia-smi or rocm-smi there, and is torch built for GPUs?",
    ),
    (
        "shared_gpu",
        r"Duplicate GPU detected ?: rank (\d+) and rank (\d+)",  # of NCCL
        "Ranks {0} and {1} use the same GPU, and NCCL wants one for each rank.",
        'Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the process group; or start at most as many '
        "ranks as there are GPUs.",
    ),
    (
        "torch_lacks_something",
        r"AttributeError: (?:module 'torch[\w.]*' has no attribute '(\w+)'|Unknown attribute (\w+))"
        r"|ImportError: cannot import name '(\w+)' from 'torch\b",
        "{who}'s torch has no {0}: the program is written for another version.",
        f"A newer torch ({OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or later for the tasks of mlbench): another --image, or "
        "the cluster attached again with another --python.",
    ),
    (
        "module_missing",
        r"ModuleNotFoundError: No module named '([\w.]+)'",
        "{who}'s Python has no module {0}.",
        "Install its package there, or name an image that has it (--image). A file of your own goes to pods with "
        "--include FILE.",
    ),
    *(
        (
            "port_in_use",
            pattern,
            f"{{who}} could not listen on {port}, which another process uses.",
            "Ranks of one machine share its ports: leave MASTER_PORT, which is free, as mlbench sets it.",
        )
        for port, pattern in (
            ("port {0}", r"Error: [^\n]*(?:port: |bind to \S*:)(\d+)\b[^\n]*(?:EADDRINUSE|errno: 98)"),
            ("a port", r"Error: \[Errno 98\] Address already in use"),
        )
    ),
)
# Of gloo, of NCCL, and of torch's sampler, which names the last rank.
SMALL_WORLD = (
    r"rank < size\. \d+ vs (\d+)|Invalid rank requested ?: \d+/(\d+)"
    r"|Invalid rank \d+, rank should be in the interval \[0, (\d+)\]"
)
# What torchrun and accelerate write once a rank has failed, and which it was.
LAUNCHER = r"^(E\d{4} [^\n]*torch/distributed/elastic/|Traceback [^\n]*\n +File \"[^\n]*/bin/(torchrun|accelerate)\")"
ROOT_CAUSE = r"(?s)Root Cause.*?\n\s*rank\s*: (\d+)"
# Lines that tell nothing about a failure: marks below a line of Python, frames of C++, and what comes after a failure.
NOISE = (
    r"(\[rank\d+\]:)?[\s~^=-]*$|frame #|[EIW]\d{4} .*torch/distributed/elastic/"
    r"|.*(destroy_process_group\(\) was not called|has NOT been destroyed)"
)
# What torch's rendezvous, gloo and mlbench's tasks print if a rank cannot connect: (host, port), host:port, or neither.
# Connections that broke later are not among them: they follow from a rank that ended.
_ADDRESS = r"[(\[]?([\w.:-]+?)[\])]?(?:, |:)(\d+)\)?"
UNREACHABLE = (
    rf"failed to connect to any network address of {_ADDRESS}",
    rf"while trying to connect to {_ADDRESS}",
    rf"failed to connect/validate to host {_ADDRESS}",
    rf"no rendezvous at {_ADDRESS} within",
    rf"(?:Network is unreachable|No route to host|timed out connecting)[^\n]*?remote=\[?{_ADDRESS}",
    r"[Cc]onnect to ([\w.:%-]+)<(\d+)> (?:failed|returned)",  # of NCCL
    r"DistNetworkError: Ping failed|connectFullMesh failed|Timed out after \d+ seconds waiting for clients",
)
_SIZE = r"([\d.]+ [KMG]iB)"
_CAPACITY = rf"total capacity of {_SIZE}"
_IN_USE = rf"has {_SIZE} memory in use"


def explain_log(who: str, text: str, logs: str, evidence: Mapping[str, object], node: str = "") -> Finding | None:
    """The finding on a process whose last lines are `text`; None if they say nothing that is known."""
    return (
        explain_interface(who, text.splitlines(), evidence)
        or explain_gpu_memory(who, text, evidence)
        or explain_driver(who, text, evidence, node=node)
        or explain_gpu_fault(who, text, logs, evidence)
        or explain_small_world(who, text, evidence)
        or explain_plain_cause(who, text, evidence)
        or explain_unreachable(who, text, evidence)
    )


def explain_gpu_memory(who: str, text: str, evidence: Mapping[str, object]) -> Finding | None:
    """The finding on a process whose `text` says that a GPU has no memory left; `who` is e.g. "Rank 3"."""
    if not re.search(GPU_MEMORY, text):
        return None
    used, capacity = re.search(_IN_USE, text), re.search(_CAPACITY, text)
    numbers = _join_facts(used and f"it used {used[1]}", capacity and f"the GPU has {capacity[1]}")
    summary = f"{who} ran out of GPU memory{numbers}."
    return Finding("gpu_out_of_memory", summary, hint="Use a smaller batch.", evidence=evidence)


def explain_driver(
    who: str, text: str, evidence: Mapping[str, object], *, node: str = "", words: str = ""
) -> Finding | None:
    """The finding on a process or container whose `text` says that the GPU's driver is not what it needs.

    torch only warns of a driver that a program on the CPU does without.
    """
    if not any(re.search(DRIVER, line) for line in text.splitlines() if "UserWarning" not in line):
        return None
    owner = f"{who[0].lower()}{who[1:]}'s node{node and f' {node}'}"
    return Finding(
        "driver_mismatch",
        f"The GPU driver of {owner} is missing, broken or too old for the program{f': {words}' if words else '.'}",
        hint="Use other nodes or a newer driver (a node whose driver was updated needs a restart), or an image or "
        "torch for an older CUDA or ROCm.",
        evidence=evidence,
    )


def explain_gpu_fault(who: str, text: str, logs: str, evidence: Mapping[str, object]) -> Finding | None:
    """The finding on a process whose `text` tells of a GPU, or of the links between GPUs, that is broken."""
    if not re.search(GPU_FAULT, text):
        return None
    hint = f"Run it again on other nodes; if it fails there, too, the program is to blame. {logs}"
    return Finding("gpu_fault", f"{who} had a GPU fault.", hint=hint, retryable=True, evidence=evidence)


def explain_interface(who: str, lines: Sequence[str], evidence: Mapping[str, object]) -> Finding | None:
    """The finding on a process whose last lines say that gloo or NCCL knows no network interface as it was given."""
    found = next((match for line in lines if (match := re.search(INTERFACE, line))), None)
    if found is None:
        return None
    name, hint = found[1] or found[2], "Unset it, or give it the name of one interface (ip addr)"
    if name is None:
        return Finding(
            "wrong_interface",
            f"{who} found no network interface for NCCL as NCCL_SOCKET_IFNAME wants it.",
            hint=f"{hint}; if it is not set, NCCL_SOCKET_IFNAME=lo connects the ranks of one machine.",
            evidence=evidence,
        )
    return Finding(
        "wrong_interface",
        f'{who} found no network interface "{name}", which GLOO_SOCKET_IFNAME names.',
        hint=f"{hint}; ^ and lists are NCCL's syntax.",
        evidence=evidence,
    )


def explain_small_world(who: str, text: str, evidence: Mapping[str, object]) -> Finding | None:
    """The finding on a process whose program counted fewer ranks than there are, as Lightning does by default."""
    found = re.search(SMALL_WORLD, text)
    if found is None:
        return None
    size = found[1] or found[2] or str(int(found[3]) + 1)
    return Finding(
        "small_world",
        f"{who} joined a world of {size} rank{'' if size == '1' else 's'}: its program counts processes itself and "
        "ignores WORLD_SIZE.",
        hint="With Lightning, Trainer(num_nodes=WORKERS); see docs/tutorial/own-training.md",
        evidence=evidence,
    )


def explain_plain_cause(who: str, text: str, evidence: Mapping[str, object]) -> Finding | None:
    """The first of PLAIN_CAUSES that `text` names. torch only warns of a GPU that a program does without."""
    text = "\n".join(line for line in text.splitlines() if "UserWarning" not in line)
    for code, pattern, summary, hint in PLAIN_CAUSES:
        if found := re.search(pattern, text):
            return Finding(code, summary.format(*filter(None, found.groups()), who=who), hint=hint, evidence=evidence)
    return None


def explain_unreachable(who: str, text: str, evidence: Mapping[str, object]) -> Finding | None:
    """The finding on a process whose `text` says that it cannot connect to another rank; None if it does not say so."""
    found = next((match for pattern in UNREACHABLE if (match := re.search(pattern, text))), None)
    if found is None:
        return None
    host, port = found.groups() if found.groups() else (None, None)
    where = f" at {host}:{port}" if host else ""
    hint = "Leave MASTER_ADDR and MASTER_PORT as mlbench sets them; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME must "
    hint += "name an interface that leads to the other ranks: ip addr"
    if host in ("127.0.0.1", "localhost", "::1"):
        hint = "Are connections from this machine to itself allowed? ip addr show lo; a firewall, or a sandbox"
    return Finding("unreachable_ranks", f"{who} cannot reach the other ranks{where}.", hint=hint, evidence=evidence)


def explain_exit(who: str, code: int, how: str, logs: str, evidence: Mapping[str, object]) -> Finding:
    """The finding on a process that ended with this code of the task contract, or in another way.

    `how` is e.g. "exited with 3" or "was killed by SIGSEGV"; `logs` is the command that shows its log.
    """

    def finding(kind: str, summary: str, hint: str, *, retryable: bool = False) -> Finding:
        return Finding(kind, f"{summary} (exit code {code}).", hint=hint, retryable=retryable, evidence=evidence)

    reason = _own_words(evidence.get("log"))
    if code == contract.EXIT_USAGE:
        return finding("usage", f"{who} rejected its arguments{reason}", logs)
    if code == contract.EXIT_WRONG:
        summary = f"A check on {who.lower()} found that communication between ranks gives wrong results"
        return finding("wrong_result", summary, f"Do not trust any result of this run. Details: {logs}")
    if code == contract.EXIT_ENVIRONMENT:
        return finding("bad_environment", f"{who} cannot run in this environment{reason}", logs)
    if code == contract.EXIT_RETRYABLE:
        summary = f"{who} failed for a reason that may be temporary"
        return finding("retryable", summary, f"Run it again. {logs}", retryable=True)
    why = ", possibly because memory ran out" if how.endswith("SIGKILL") else ""
    return Finding("rank_crashed", f"{who} {how}{why}.", hint=logs, evidence=evidence)


def _own_words(lines: object) -> str:
    """The last reason that an mlbench task printed ("rank 0: REASON", and perhaps a hint) as the end of a sentence."""
    found: list[str] = []
    for line in reversed(lines if isinstance(lines, list) else []):
        said = re.fullmatch(r"rank \d+: (.+)", str(line))
        if said is None:
            break
        found.append(said[1])
    return f": {found[-1].rstrip('.')}" if found else ""


def describe_signal(number: int) -> str:
    """ "was killed by SIGKILL" for 9; "was killed by signal N" for a number without a name."""
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"was killed by signal {number}"


def describe_peak(peak: int | None, limit: int | None) -> str:
    """Peak and limit, in bytes, as the end of a sentence; empty if neither is known."""
    return _join_facts(peak and f"its largest process used {size(peak)}", limit and f"the limit is {size(limit)}")


def last_lines(text: str, count: int) -> list[str]:
    """The last lines of a log as evidence: no events, control characters or other noise, of bounded width."""
    return _clean_lines(_without_launcher(text), count) or _clean_lines(text, count)


def _clean_lines(text: str, count: int) -> list[str]:
    lines: list[str] = []
    for line in reversed(text.split("\n")):
        if contract.parse_event(line) is not None:
            continue
        clean = "".join(char if char.isprintable() else " " for char in without_colors(line)).strip()
        if not re.match(NOISE, clean):
            lines.append(clean[:EVIDENCE_WIDTH])
        if len(lines) == count:
            break
    return lines[::-1]


def _without_launcher(text: str) -> str:
    """A log without the report of a launcher; of the rank that failed alone, if the lines of ranks are marked."""
    starts = [found.start() for found in re.finditer(LAUNCHER, text, re.MULTILINE)]
    before, report = (text[: starts[-1]], text[starts[-1] :]) if starts else (text, "")
    if not re.search(r"ChildFailedError|CalledProcessError", report):
        return text
    root = re.search(ROOT_CAUSE, report)
    marked = [line for line in before.split("\n") if root and line.startswith(f"[rank{root[1]}]:")]
    return "\n".join(marked) or before


def _join_facts(*facts: object) -> str:
    known = [str(fact) for fact in facts if fact]
    return f": {', '.join(known)}" if known else ""
