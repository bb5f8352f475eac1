"""Entry point of the `mlbench` command and of `python -m mlbench_cli`."""

import gc
import os
import sys
from io import TextIOWrapper

from mlbench_cli import __version__
from mlbench_cli.isolation import protect_path
from mlbench_cli.util.commit import describe_version

# New objects after which Python looks for cycles. Nearly all that a start makes lives as long as the command: with
# Python's own 700 it is searched some 50 times, for a seventh of the time of `mlbench status`.
_OBJECTS_PER_COLLECTION = 50_000


def main() -> int:
    """Run the command line of sys.argv and return its exit code.

    130 for Ctrl-C while modules are still being loaded.
    """
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        protect_path()
        return _main(sys.argv[1:])
    except KeyboardInterrupt:  # while modules were still being loaded; later, boundary.run takes care
        return 130


def _main(argv: list[str]) -> int:
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # an odd file name or locale must not end in a traceback
            stream.reconfigure(errors="backslashreplace")
    # These are answered without Typer, whose import alone takes several times as long as the interpreter's start.
    if argv == ["--version"]:
        return _answer(f"mlbench {describe_version(__version__)}\n")
    is_completion = "_MLBENCH_COMPLETE" in os.environ
    if argv in ([], ["-h"], ["--help"]) and not is_completion:
        from mlbench_cli.commands import help_text

        return _answer(help_text())
    if argv[:1] == ["status"] and not any(word.startswith("-") for word in argv) and not is_completion:
        from mlbench_cli import boundary
        from mlbench_cli.commands._status import print_status

        code = boundary.run(argv[1:], print_status)
    else:
        from mlbench_cli.app import run

        code = run(argv)
    if code in (130, 143):
        _flush_and_exit(code)  # a thread that is still busy must not hold up who was stopped
    return code


def _flush_and_exit(code: int) -> None:
    import contextlib

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _open_closed_streams() -> None:
    """Whoever starts the tool may have closed them; Python then has None in place of a stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _answer(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Nobody reads it, or there is no room. What is buffered must not be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141 if isinstance(error, BrokenPipeError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
