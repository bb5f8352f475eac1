"""From start to end of a rank: contract variables in, exit code out, no tracebacks for expected errors."""

import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from task_images.contract import EXIT_RETRYABLE, EXIT_USAGE, Contract, ContractError
from task_images.methods.servers import serve

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


def run(main: Callable[[Contract], None]) -> NoReturn:
    """Call `main` with the contract's variables and exit: 0, or the code of `errors`.

    Expected errors print one line on standard error; anything else is a bug and keeps its traceback (exit 1).
    """
    try:
        contract = Contract()
        code = _call(main, contract)
    except ContractError as error:
        _say(0, str(error))
        code = EXIT_USAGE
    sys.exit(code)


def _call(main: Callable[[Contract], None], contract: Contract) -> int:
    """What the process exits with after `main`."""
    from task_images.errors import TaskError

    rank = contract.rank
    try:
        if contract.role == "server":
            serve(contract)
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


def tells_of_lost_peer(error: Exception) -> bool:
    """Whether an error of a collective means that another rank is gone, and not that the call was wrong."""
    return any(words in str(error).lower() for words in _LOST)


def _say(rank: int, message: str, hint: str | None = None) -> None:
    lines = f"rank {rank}: {message}\n" + (f"rank {rank}: {hint}\n" if hint else "")
    sys.stderr.write(lines)
    sys.stderr.flush()
