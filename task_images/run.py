"""From start to end of a rank: contract variables in, exit code out, no tracebacks for expected errors.

`python -m task_images.run TASK` is a rank of a task: a task's name, or the package of your own task.
"""

import contextlib
import getpass
import io
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from task_images.contract import EXIT_RETRYABLE, EXIT_USAGE, PREFIX, Contract, ContractError, TaskError, TaskUsageError
from task_images.methods import FILES

# Messages of gloo and NCCL when the other end of a collective is gone.
_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "connection refused",
    # Messages of NCCL and of torch's watchdog.
    "connection closed by remote peer",
    "remote process exiting",
    "ncclremoteerror",
    "watchdog caught collective operation timeout",
    "communicator was aborted",
)


# IPv4 without those of this machine, and IPv6 as in "[fd00::1]:29500".
_IPV4 = r"(?<![\w.])(?!127\.|0\.0\.0\.0)\d{1,3}(\.\d{1,3}){3}(?![\w.])"
_IPV6 = r"\[[0-9a-fA-F.]*:[0-9a-fA-F:.]*\](?=:\d)"
_ADDRESS = re.compile(f"{_IPV4}|{_IPV6}")


def run(main: Callable[[Contract], None]) -> NoReturn:
    """Call `main` with the contract's variables and exit: 0, or the code of `errors`.

    Expected errors print one line on standard error; anything else is a bug and keeps its traceback (exit 1).
    """
    try:
        contract = Contract()
        if contract.anonymous:
            sys.stdout, sys.stderr = _Anonymous(sys.stdout, contract), _Anonymous(sys.stderr, contract)
        code = _call(main, contract)
    except ContractError as error:
        _say(0, str(error))
        code = EXIT_USAGE
    sys.exit(code)


def _call(main: Callable[[Contract], None], contract: Contract) -> int:
    """What the process exits with after `main`."""
    rank = contract.rank
    try:
        if contract.role == "server":
            import_module(f"task_images.methods.{FILES['bsp-ps']}").serve(contract)
        else:
            main(contract)
    except ContractError as error:
        _say(rank, str(error))
        return EXIT_USAGE
    except TaskError as error:
        _say(rank, str(error), error.hint)
        return error.exit_code
    except RuntimeError as error:
        if not tells_of_lost_peer(error):
            traceback.print_exc()
            return 1
        _say(
            rank,
            f"lost another rank: {' '.join(str(error).split())[:300]}",
            "See the log of the rank that failed first for the cause.",
        )
        return EXIT_RETRYABLE
    return 0


class _Anonymous(io.TextIOWrapper):
    """Standard output or error of an anonymous run, without names of hosts and users, addresses, and local paths: those
    of messages, tracebacks and of libraries that print."""

    def __init__(self, stream: TextIO, contract: Contract) -> None:
        stream.flush()
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
        paths = {
            contract.output_dir: "OUTPUT",
            contract.data_dir: "DATA",
            contract.checkpoint_dir: "CHECKPOINTS",
            str(Path(__file__).parents[1]): "MLBENCH",
            sys.prefix: "PYTHON",
            sys.base_prefix: "PYTHON",
            os.getcwd(): "FOLDER",
            os.path.expanduser("~"): "~",
        }
        self._paths = sorted(((path, word) for path, word in paths.items() if path and len(path) > 1), reverse=True)
        hosts = [*contract.hosts, *[""] * (contract.node_rank + 1)]
        hosts[contract.node_rank] = hosts[contract.node_rank] or socket.gethostname()
        names = {contract.master_addr: "node-0", socket.gethostname(): f"node-{contract.node_rank}"}
        names |= {host: f"node-{number}" for number, host in enumerate(hosts)}
        self._words = {
            re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])"): word
            for name, word in names.items()
            if name not in ("", "localhost", "127.0.0.1")
        }
        with contextlib.suppress(OSError, KeyError):  # a user without a name
            self._words[re.compile(rf"(?<=/){re.escape(getpass.getuser())}(?![\w-])")] = "USER"

    def write(self, text: str) -> int:
        """Write `text`, and return its length. Events have words of the contract, which a host may be named like; they
        name hosts in fields of their own."""
        hidden = text
        for path, word in self._paths:
            hidden = hidden.replace(path, word)
        if not text.lstrip("\n").startswith(PREFIX):
            for pattern, word in self._words.items():
                hidden = pattern.sub(word, hidden)
            hidden = _ADDRESS.sub("ADDRESS", hidden)
        super().write(hidden)
        return len(text)


def tells_of_lost_peer(error: Exception) -> bool:
    """Whether an error of a collective means that another rank is gone, and not that the call was wrong."""
    return any(words in str(error).lower() for words in _LOST)


def _say(rank: int, message: str, hint: str | None = None) -> None:
    lines = f"rank {rank}: {message}\n" + (f"rank {rank}: {hint}\n" if hint else "")
    sys.stderr.write(lines)
    sys.stderr.flush()


def find_package(task: str) -> str:
    """The package of a task: one of mlbench's by its name, or any by its dotted name."""
    is_own = task.isidentifier() and Path(__file__).with_name(task).joinpath("task.py").is_file()
    return f"task_images.{task}" if is_own else task


def find_in(package: str, name: str, *modules: str) -> Any:
    """What the first of a package's modules that has it calls `name`; the module "" is the package itself. None if none
    has it, or if there is no such package."""
    for module in modules if package.replace(".", "").isidentifier() else ():
        place = f"{package}.{module}".rstrip(".")
        try:
            found = getattr(import_module(place), name, None)
        except ModuleNotFoundError as error:
            if not f"{place}.".startswith(f"{error.name}."):  # it is not the place, but something that it imports
                raise
            continue
        if found is not None:
            return found
    return None


def start(words: Sequence[str]) -> None:
    """Be a rank of the task that the first word names: its `main`, in its package or in its module `task`."""

    def main(contract: Contract) -> None:
        if contract.anonymous:
            # Torch's own messages about connections name hosts, and do not pass through Python.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if not words:
            raise TaskUsageError("the name of a task is missing", "python -m task_images.run TASK")
        own = find_in(find_package(words[0]), "main", "", "task")
        if own is None:
            raise TaskUsageError(
                f"{words[0]!r} is no task: no such package has a function `main`, or a module `task` with one",
                "mlbench tasks",
            )
        own(contract)

    run(main)


if __name__ == "__main__":
    start(sys.argv[1:])
