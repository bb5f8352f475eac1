"""Entry point of the `mlbench` command and of `python -m mlbench_cli`."""

import gc
import os
import sys
from io import TextIOWrapper

from mlbench_cli.isolation import protect_path

# New objects after which Python looks for cycles: more than a start makes (60,000 for `mlbench status`), nearly all of
# which live as long as the command. One search of 50,000 objects takes 10 ms.
_OBJECTS_PER_COLLECTION = 100_000


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
    finally:
        gc.freeze()  # Python searches all objects twice more as it ends, which takes 25 ms


def _main(argv: list[str]) -> int:
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # an odd file name or locale must not end in a traceback
            stream.reconfigure(errors="backslashreplace")
    from mlbench_cli.app import run  # modules come from the right folders now, and Ctrl-C is handled

    code = run(argv)
    if code in (130, 143):
        _flush_and_exit(code)  # a thread that is still busy must not hold up who was stopped
    return code


def _flush_and_exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue
    os._exit(code)


def _open_closed_streams() -> None:
    """Whoever starts the tool may have closed them; Python then has None in place of a stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


if __name__ == "__main__":
    sys.exit(main())
