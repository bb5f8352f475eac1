"""The command line: a Typer group that imports a command's module only when that command runs, and the error boundary.

`run` is the one place where an exception becomes an exit code. Nothing below it prints an error or calls sys.exit.
"""

import os
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer
from typer.core import CompletionItem, TyperCommand, TyperGroup  # type: ignore[attr-defined]
from typer.main import get_command

from mlbench_cli import __version__, commands, console
from mlbench_cli.commands._values import FOLDED, HELP_ALL, build_command
from mlbench_cli.errors import (
    Explanation,
    Interrupted,
    MlbenchError,
    Stopped,
    Terminated,
    UsageError,
    did_you_mean,
)
from mlbench_cli.util.commit import describe_version

HELP_NAMES = {"help_option_names": ["-h", "--help"]}  # also of all sub-commands, which inherit it
# What a shell reports of a program that SIGPIPE ended: the reader of a pipe went away, as in `mlbench logs x | head`.
EXIT_PIPE = 141
STOP_SECONDS = 1.8  # after a signal in which a command says what is true, and ends
# -o, alone or behind switches as in -yo, with its value in the next word or the same.
_OUTPUT, _OUTPUT_JSON = re.compile("-[a-zA-Z]*o"), re.compile("-[a-zA-Z]*o=?json")


class PanelCommand(TyperCommand):
    """A command whose help groups options by panel; Typer does so only in its slow, colored help.

    A command with the option --help-all shows only arguments, its plain options and its first panel; --help-all shows
    every panel.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options below the headings of their panels."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        folded = {} if ctx.meta.get(HELP_ALL) else {name: panels.pop(name) for name in FOLDED if name in panels}
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)
        if folded:
            with formatter.section(f"{sum(map(len, folded.values()))} more options"):
                formatter.write_text(f"{ctx.command_path} --help-all")


class LazyGroup(TyperGroup):
    """The commands of `commands.PANELS`, each imported when it is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands, in the order of the table."""
        return commands.names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command's module and build the command; None if the table has no such name."""
        entry = commands.find(cmd_name)
        if entry is None:
            return None
        target = getattr(import_module(entry.module), entry.attribute)
        if not isinstance(target, typer.Typer):
            function, target = target, typer.Typer(rich_markup_mode=None, add_completion=False)
            target.command(cls=PanelCommand)(function)
        return build_command(target)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        """Commands that begin with `incomplete`, with their help, without importing any of them."""
        found = ((name, entry) for panel in commands.PANELS.values() for name, entry in panel.items())
        return [CompletionItem(name, help=entry.help) for name, entry in found if name.startswith(incomplete)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. Raises UsageError with the nearest name if there is none."""
        if not args[0].startswith("-") and commands.find(args[0]) is None:
            near = did_you_mean(args[0], commands.names())
            raise UsageError(f'There is no command "{args[0]}".{near}', hint="mlbench --help")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help that the table of commands gives, without importing any of them."""
        formatter.write(commands.help_text())


app = typer.Typer(cls=LazyGroup, rich_markup_mode=None, context_settings=HELP_NAMES, invoke_without_command=True)


@app.callback()
def _root(context: typer.Context, version: Annotated[bool, typer.Option("--version")] = False) -> None:
    if version:
        console.out(f"mlbench {describe_version(__version__)}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        console.out(commands.help_text().rstrip())


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Every error becomes one paragraph, or one JSON document."""
    with _stopping_on_signals():
        try:
            code = _dispatch(argv)
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt, Stopped) as error:
            if isinstance(error, BrokenPipeError) and _discard_output():
                return EXIT_PIPE
            if os.environ.get("MLBENCH_DEBUG"):
                import traceback

                traceback.print_exc()
            return _report(_explain(error), as_json=_wants_json(argv))


def _dispatch(argv: Sequence[str]) -> int:
    group = get_command(app)
    if "_MLBENCH_COMPLETE" in os.environ:
        group.main(prog_name="mlbench")  # prints completions and exits
    try:
        # Not group.main(), which turns Ctrl-C and closed pipes into exits of its own.
        with group.make_context("mlbench", list(argv), obj=tuple(argv)) as context:
            code = group.invoke(context)
    except typer.Exit as error:
        return error.exit_code
    return code if isinstance(code, int) else 0


def _explain(error: BaseException) -> Explanation:
    """Any exception as one that a user understands."""
    if isinstance(error, Explanation):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Interrupted.")
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        if re.fullmatch(r"-\d+", option := str(getattr(error, "option_name", None))):
            return UsageError(f"{option} is not a valid number here: numbers begin at 0.", hint="Write it without -.")
        return UsageError(error.format_message(), hint=f"{context.command_path if context else 'mlbench'} --help")
    if isinstance(error, OSError):
        return MlbenchError(f"Operating system error: {error}.", details={"errno": error.errno})
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

    The process ends STOP_SECONDS later whatever it does then: a call that blocks, or a thread that nobody can stop.
    What is cut off is safe at any moment: records are transactions, files are replaced as a whole, and a run's archive
    is completed by its agent or by the next command. A second signal ends the process at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timers: list[threading.Timer] = []

    def stop(number: int, frame: object) -> NoReturn:
        for each in before:
            signal.signal(each, lambda again, frame: os._exit(128 + again))
        timers.append(threading.Timer(STOP_SECONDS, os._exit, (128 + number,)))
        timers[0].daemon = True
        timers[0].start()
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
        for timer in timers:
            timer.cancel()
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
