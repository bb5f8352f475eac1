"""Entry point of the `mlbench` command and of `python -m mlbench_cli`."""

import gc
import os
import sys
from io import TextIOWrapper

from mlbench_cli.isolation import protect_path

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


if __name__ == "__main__":
    sys.exit(main())
