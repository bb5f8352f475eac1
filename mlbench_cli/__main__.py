"""Entry point of the `mlbench` command and of `python -m mlbench_cli`."""

import sys

from mlbench_cli import __version__


def main() -> int:
    # Answered before Typer is imported, which alone takes five times as long as the interpreter's start.
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"mlbench {__version__}\n")
        return 0
    from mlbench_cli.app import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
