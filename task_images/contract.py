"""What a task is given and what it gives back: the one module that the tool and the tasks share.

Standard library only, Python 3.9 or later, no import of anything else in this project, so that a custom image may
copy this single file. Whoever writes in another language needs only the two tables below.

Given to every rank, as environment variables
---------------------------------------------
RANK, WORLD_SIZE                 this process among all processes, 0 ... WORLD_SIZE-1
LOCAL_RANK, LOCAL_WORLD_SIZE     this process among those of its worker
NODE_RANK                        this worker among the workers
MASTER_ADDR, MASTER_PORT         where rank 0 listens for the rendezvous
MLBENCH_RUN_ID                   name of the run
MLBENCH_BACKEND                  communication backend: gloo, nccl, mpi, grpc (TensorFlow), or a custom word
MLBENCH_HOSTS                    comma list of the workers' host names, in the order of NODE_RANK
MLBENCH_DEVICE                   cpu or gpu
MLBENCH_GOAL                     full or light
MLBENCH_OUTPUT_DIR               writable folder of this process; what is in it at the end is collected
MLBENCH_DATA_DIR                 folder with data sets, or empty
MLBENCH_SEED                     integer seed of the run
MLBENCH_PARAMETERS               JSON object: the task's resolved parameters
MLBENCH_METHOD                   JSON object: how ranks communicate, name and options; empty: the task's own way
MLBENCH_ROLE                     trainer (or empty), or server: outside the collective, RANK is WORLD_SIZE + its number
MLBENCH_SERVERS                  number of parameter servers
MLBENCH_ATTEMPT                  how often the ranks of this run have been started again; not there: 0
MLBENCH_CHECKPOINT_DIR           folder for checkpoints that ranks are started again from; not there: none are
MLBENCH_CHECKPOINT_EVERY         time between those checkpoints (30s, 5m), or their number of updates (200)
MLBENCH_RESUME                   the checkpoint in that folder to resume from; empty: start from scratch
MLBENCH_COLLECTIVE_SECONDS       longest time that a rank may keep the others waiting in a collective
MLBENCH_ANONYMOUS                not empty: the run reports no names of hosts or users, no addresses and no paths

Taken from every rank
---------------------
its exit code, its standard output and error, the files of its output folder, and events: lines of standard output
that begin with "@mlbench " followed by one JSON object, which always has

    v      1
    event  metric | phase | result | environment
    rank   integer
    time   seconds since 1970, UTC

and further, by kind of event,

    metric       name, value; optional epoch, step, unit, seconds (on the clock of the result)
    phase        phase: loading | training | validation | finished | a word of the task's own; optional epoch,
                 epochs, step, steps, goal (object: metric, comparison, threshold, value)
    environment  any facts: framework and its version, device, threads, host, libraries (object: name -> version),
                 cpu, cores, cpu_quota, gpus, gpu_driver; from rank 0 code_digest, method_digest, and packages (name
                 -> version)
    result       outcome: goal_reached | goal_missed | completed | budget_spent (training ended at its time budget,
                 whatever became of the goal on the way)
                 goal: null, or object with metric, comparison (">=" or "<="), threshold, kind (full | light), value
                 (that which reached it, else the best), last (what the training ended with)
                 budget_seconds: the time budget, if the outcome is budget_spent
                 wall_seconds: from the first training step to the goal or to the end, validation included
                 training_seconds: rank 0's sum over training steps, without data wait and validation
                 timings: object, category -> object with min, mean, max, rank0 (seconds, over ranks)
                 updates, samples, epochs: how much was trained
                 synthetic: true if the data were generated
                 data: name of the data
                 data_identity: object with counts (object: part -> number of samples), digest ("sha256:HEX" of the
                 decoded data, or null), official (true: the published data set; false; null: not known) and reason
                 (one line, why they are not the official data; null if they are). Without it nothing is known
                 details: object with whatever else the task found

A rank that reports nothing is still a valid rank. Exit codes pass through unchanged; by convention 64 is a usage
error, 70 a check of the task's own that found wrong results, 75 a trouble that may pass, 78 an environment in which the
task cannot run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import stat
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

PREFIX = "@mlbench "
VERSION = 1
KINDS = ("metric", "phase", "result", "environment")
OUTCOMES = ("goal_reached", "goal_missed", "completed", "budget_spent")

HIGHEST = 2**53  # ranks and times beyond it are no figures

EXIT_USAGE = 64
EXIT_WRONG = 70
EXIT_RETRYABLE = 75
EXIT_ENVIRONMENT = 78

# The tracker's categories add up to the wall time. Older archives know the step names behind "was".
CATEGORIES = (
    "data_wait",
    "preprocessing",  # was batch_load
    "forward",  # was fwd_pass
    "loss",  # was comp_loss
    "backward",  # was backprop
    "communication",  # was agg
    "optimizer",  # was opt_step
    "metrics",  # was comp_metrics
    "validation",
    "other",
)
COMPUTE_CATEGORIES = ("forward", "loss", "backward", "optimizer")
# Where a method sends messages inside a phase, their time cannot be told from computing: the phase counts as this
# category instead, and "communication" is absent.
MIXED_CATEGORIES = {name: f"{name}_and_communication" for name in ("forward", "backward", "optimizer")}
ALL_CATEGORIES = (*CATEGORIES, *MIXED_CATEGORIES.values())


class ContractError(ValueError):
    """A variable of the contract is missing or malformed. The message names it."""


class Contract:
    """The variables of the contract, parsed. Attributes are named as the variables, in lower case, without MLBENCH_."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.rank = _integer(environ, "RANK", 0)
        self.world_size = _integer(environ, "WORLD_SIZE", 1)
        self.local_rank = _integer(environ, "LOCAL_RANK", 0)
        self.local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", 1)
        self.node_rank = _integer(environ, "NODE_RANK", 0)
        self.master_addr = environ.get("MASTER_ADDR", "127.0.0.1")
        self.master_port = _integer(environ, "MASTER_PORT", 29500)
        self.run_id = environ.get("MLBENCH_RUN_ID", "unnamed")
        self.backend = environ.get("MLBENCH_BACKEND", "gloo")
        self.hosts = [host for host in environ.get("MLBENCH_HOSTS", "").split(",") if host]
        self.device = environ.get("MLBENCH_DEVICE", "cpu")
        self.goal = environ.get("MLBENCH_GOAL", "full")
        self.output_dir = environ.get("MLBENCH_OUTPUT_DIR", ".")
        self.data_dir = environ.get("MLBENCH_DATA_DIR") or None
        self.seed = _integer(environ, "MLBENCH_SEED", 42)
        self.parameters = _object(environ, "MLBENCH_PARAMETERS")
        self.method = _object(environ, "MLBENCH_METHOD")
        self.role = environ.get("MLBENCH_ROLE") or "trainer"
        self.servers = _integer(environ, "MLBENCH_SERVERS", 0)
        self.attempt = _integer(environ, "MLBENCH_ATTEMPT", 0)
        self.checkpoint_dir = environ.get("MLBENCH_CHECKPOINT_DIR") or None
        self.checkpoint_every = environ.get("MLBENCH_CHECKPOINT_EVERY") or None
        self.resume_from = environ.get("MLBENCH_RESUME") or None
        self.collective_seconds = _integer(environ, "MLBENCH_COLLECTIVE_SECONDS", 0)
        self.anonymous = bool(environ.get("MLBENCH_ANONYMOUS"))
        if self.role not in ("trainer", "server"):
            raise ContractError(f"MLBENCH_ROLE is {self.role!r}, not trainer or server")
        if self.role == "server":
            if not self.world_size <= self.rank < self.world_size + self.servers:
                raise ContractError(
                    f"RANK is {self.rank} but WORLD_SIZE is {self.world_size} and MLBENCH_SERVERS {self.servers}"
                )
        elif not 0 <= self.rank < self.world_size:
            raise ContractError(f"RANK is {self.rank} but WORLD_SIZE is {self.world_size}")
        if self.device not in ("cpu", "gpu"):
            raise ContractError(f"MLBENCH_DEVICE is {self.device!r}, not cpu or gpu")
        if self.goal not in ("full", "light"):
            raise ContractError(f"MLBENCH_GOAL is {self.goal!r}, not full or light")


def anonymize(value: str) -> str:
    """What an anonymous run records of a variable: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(os.fsencode(value)).hexdigest()[:16]


def emit(event: str, rank: int | None = None, stream: TextIO | None = None, **fields: Any) -> None:
    """Report one event on standard output, in one write, so that ranks that share a log cannot tear it.

    Where a log is a file, an event begins a line there, whatever a progress bar left unfinished before it.
    """
    record = {"v": VERSION, "event": event, "rank": _own_rank() if rank is None else rank, "time": time.time()}
    record.update(fields)
    stream = sys.stdout if stream is None else stream
    line = format_event(record) + "\n"
    stream.flush()
    stream.write("\n" + line if _has_open_line(stream) else line)
    stream.flush()


def _has_open_line(stream: TextIO) -> bool:
    """Whether the stream goes to a file whose last line has no end yet; also if another stream wrote it."""
    try:
        descriptor = stream.fileno()
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not found.st_size:
            return False
        with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # the stream itself may be for writing only
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except (OSError, ValueError, AttributeError):  # no file, no /proc, no stream of the system
        return False


def format_event(record: Mapping[str, Any]) -> str:
    """The line of one event, without newline. Non-finite numbers become the strings "nan", "inf", "-inf"; tensors and
    arrays of one number are numbers."""
    return PREFIX + json.dumps(_plain(record), ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def parse_event(line: str | bytes) -> dict[str, Any] | None:
    """The event in a log line (str or bytes) as a dictionary, or None if the line holds none. Never raises.

    An event may stand behind an unfinished line of the other stream (a progress bar, say), where both go to one log.
    """
    if isinstance(line, bytes):
        start = line.find(b"@mlbench {")
        text = line[start:].decode("utf-8", "replace") if start >= 0 else ""
    else:
        start = line.find(PREFIX + "{")
        text = line[start:] if start >= 0 else ""
    if not text:
        return None
    try:
        record = json.loads(text[len(PREFIX) :])
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("v") != VERSION or record.get("event") not in KINDS:
        return None
    rank, moment = record.get("rank"), record.get("time")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < HIGHEST:
        return None
    # A comparison, since an integer of many digits is no float; it refuses nan and infinities, too.
    if isinstance(moment, bool) or not isinstance(moment, (int, float)) or not -HIGHEST < moment < 1e20:
        return None
    # 1e11 seconds are the year 5138: other reporters count milliseconds, microseconds or nanoseconds.
    unit = next((unit for least, unit in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)) if moment >= least), None)
    if unit is not None:
        record["time"] = moment / unit
    return record


def _own_rank() -> int:
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError:
        return 0


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ContractError(f"{name} is {text!r}, not an integer") from None


def _object(environ: Mapping[str, str], name: str) -> dict[str, Any]:
    text = environ.get(name) or "{}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ContractError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ContractError(f"{name} is not a JSON object")
    return value


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # of torch or numpy
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def install_hint(extra: str) -> str:
    """The command that installs an extra of mlbench in the environment of this task."""
    return f"pip install '.[{extra}]' in a checkout of mlbench, for the Python that runs the task"


class TaskError(Exception):
    """The task failed (exit 1). The message says what happened and why; `hint` what to do next."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class TaskUsageError(TaskError):
    """The parameters or variables given to the task are wrong (exit 64)."""

    exit_code = EXIT_USAGE


class PeerLostError(TaskError):
    """Another rank never arrived or has gone (exit 75, so that the exit code of the failed rank stands out)."""

    exit_code = EXIT_RETRYABLE


class EnvironmentUnfitError(TaskError):
    """The task cannot run here: no such backend, device or data (exit 78)."""

    exit_code = EXIT_ENVIRONMENT


class WrongResultError(TaskError):
    """Communication gave a wrong result (exit 70). No figure of such a run can be trusted."""

    exit_code = EXIT_WRONG


class DivergedError(TaskError):
    """The loss became NaN or infinite, or the replicas differ (exit 1). Never counts as a goal."""


def need(*packages: str, extra: str = "language") -> None:
    """Raises EnvironmentUnfitError naming the first of `packages` that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise EnvironmentUnfitError(f"the package {package} is not installed", install_hint(extra))
