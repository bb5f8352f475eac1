"""The error boundary of the command line: the one place where an exception becomes an exit code.

Nothing below it prints an error or calls sys.exit.
"""

import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NoReturn

from mlbench_cli import console
from mlbench_cli.errors import Explanation, Interrupted, MlbenchError, Stopped, Terminated, explain_os_error
from mlbench_cli.util import stopping

# As shells report a program that SIGPIPE ended because nobody reads its output any more: `mlbench logs x | head`.
EXIT_PIPE = 141
STOP_SECONDS = 1.8  # after a signal in which a command says what is true, and ends
# -o, alone or behind switches as in -yo, with its value in the next word or the same.
_OUTPUT, _OUTPUT_JSON = re.compile("-[a-zA-Z]*o"), re.compile("-[a-zA-Z]*o=?json")


def run(argv: Sequence[str], dispatch: Callable[[Sequence[str]], int]) -> int:
    """Run one command line by `dispatch` and return its exit code. Every error becomes one paragraph, or one JSON
    document."""
    with _stopping_on_signals():
        try:
            code = dispatch(argv)
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt, Stopped) as error:
            if isinstance(error, BrokenPipeError) and _discard_output():
                return EXIT_PIPE
            if os.environ.get("MLBENCH_DEBUG"):
                traceback.print_exc()
            return _report(_explain(error), as_json=_wants_json(argv))


def _explain(error: BaseException) -> Explanation:
    """Any exception as one that a user understands."""
    if isinstance(error, Explanation):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Interrupted.")
    if isinstance(error, OSError):
        return explain_os_error(error, f"Operating system error: {error}.")
    return MlbenchError(
        f"Internal error: {type(error).__name__}: {error}",
        hint="Please report this. MLBENCH_DEBUG=1 before the command shows where it happened.",
        details={"type": type(error).__name__},
    )


def _report(error: Explanation, *, as_json: bool) -> int:
    try:
        console.show_error(error, as_json=as_json)
    except OSError:
        _discard_output()
    return error.exit_code


def _wants_json(argv: Sequence[str]) -> bool:
    """Whether errors are to be JSON, found without parsing, since parsing may be what fails."""
    words = list(argv[: argv.index("--")] if "--" in argv else argv)
    long = () if words[:1] == ["download"] else ("--output",)  # there it names a file
    return any(
        word in [f"{name}=json" for name in long]
        or _OUTPUT_JSON.fullmatch(word) is not None
        or ((word in long or _OUTPUT.fullmatch(word) is not None) and following == "json")
        for word, following in pairwise([*words, ""])
    )


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """SIGTERM raises Terminated inside, SIGINT KeyboardInterrupt, so that what is under way ends gracefully.

    The process ends STOP_SECONDS later (or when the command says, see `stopping`) whatever it does then: a call that
    blocks, or a thread that nobody can stop.
    What is cut off is safe at any moment: records are transactions, files are replaced as a whole, and a run's archive
    is completed by its agent or by the next command. A second signal ends the process at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        for each in before:
            signal.signal(each, lambda again, frame: os._exit(128 + again))
        stopping.end_after(STOP_SECONDS, 128 + number)
        if number == signal.SIGTERM:
            raise Terminated("Terminated (SIGTERM).")
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if before[signal.SIGINT] is not signal.default_int_handler:  # a shell's "&" has it ignored
        del before[signal.SIGINT]
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        stopping.call_off()
        for number, handler in before.items():
            signal.signal(number, handler)


def _discard_output() -> bool:
    """Whether nobody reads a standard stream any more. What it still holds is dropped: it would fail again at exit."""
    broken = False
    for stream in (sys.stdout, sys.stderr):
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # poll reports a closed pipe without being asked to
        try:
            unread = bool(poll.poll(0))
            stream.flush()
        except OSError:
            unread = True
        if unread:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        broken = broken or unread
    return broken
