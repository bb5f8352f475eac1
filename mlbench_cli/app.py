"""The command line: a Typer group that imports a command's module only when that command runs."""

import os
import re
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise, takewhile
from typing import Annotated, Any

import typer
from typer.core import CompletionItem, TyperGroup  # type: ignore[attr-defined]
from typer.main import get_command

from mlbench_cli import __version__, boundary, commands, console
from mlbench_cli.commands._values import PanelCommand, build_command
from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.util import gone
from mlbench_cli.util.commit import describe_version

HELP_NAMES = {"help_option_names": ["-h", "--help"]}  # also of all sub-commands, which inherit it


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
            target.command(cls=getattr(function, "command_class", PanelCommand))(function)
        return build_command(target)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        """Commands that begin with `incomplete`, with their help, without importing any of them."""
        found = ((name, entry) for panel in commands.PANELS.values() for name, entry in panel.items())
        return [CompletionItem(name, help=entry.help) for name, entry in found if name.startswith(incomplete)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. Raises UsageError with the nearest name if there is none."""
        if not args[0].startswith("-") and commands.find(args[0]) is None:
            if args[0] in gone.COMMANDS:
                raise UsageError(f"mlbench {args[0]} was removed.", hint=gone.COMMANDS[args[0]])
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
        console.out(commands.help_text().rstrip(), raw=True)


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    return boundary.run(argv, _dispatch)


def _dispatch(argv: Sequence[str]) -> int:
    group = get_command(app)
    if "_MLBENCH_COMPLETE" in os.environ:
        group.main(prog_name="mlbench")  # prints completions and exits
    _refuse_empty_words(argv)
    try:
        # Not group.main(), which turns Ctrl-C and closed pipes into exits of its own.
        with group.make_context("mlbench", list(argv), obj=tuple(argv)) as context:
            code = group.invoke(context)
    except typer.Exit as error:
        return error.exit_code
    except typer.TyperException as error:
        raise _explain(error) from error
    return code if isinstance(code, int) else 0


def _refuse_empty_words(argv: Sequence[str]) -> None:
    """Raises UsageError for an empty word, which would be read as this folder, or as no choice. Behind "--" it belongs
    to a command of the user."""
    hint = "Check the shell variables in this command line."
    for before, word in pairwise(("mlbench", *takewhile(lambda word: word != "--", argv))):
        if not word:
            raise UsageError(f'The word after "{before}" is empty.', hint=hint)
        if re.fullmatch(r"--[\w-]+=", word):
            raise UsageError(f"{word[:-1]} has no value.", hint=hint)


def _explain(error: typer.TyperException) -> UsageError:
    """A command line that Typer does not understand."""
    context = getattr(error, "ctx", None)
    if re.fullmatch(r"-\d+", option := str(getattr(error, "option_name", None))):
        return UsageError(f"{option} is not a valid number here: numbers begin at 0.", hint="Write it without -.")
    if option in gone.OPTIONS:
        return UsageError(f"{option} was removed.", hint=gone.OPTIONS[option])
    if context is not None and error.message == "Missing command.":
        *names, last = context.command.list_commands(context)
        wanted = "provider" if context.info_name == "create-cluster" else "command"
        return UsageError(
            f"{context.command_path} needs a {wanted}: {', '.join(names)}{' or ' if names else ''}{last}.",
            hint=f"{context.command_path} {last if not names else names[0]} --help",
        )
    path = context.command_path if context else "mlbench"
    if error.message.startswith("No such option"):
        near = getattr(error, "possibilities", None) or []
        # Without their dashes, which would make all options alike.
        meant = did_you_mean(option.lstrip("-"), [name.lstrip("-") for name in near]).replace(' "', ' "--')
        hint = f"{path} --help"
        if not meant and path == "mlbench run":
            is_short = not option.startswith("--")
            other = "options of create-cluster are long here: --machine-type"
            hint += f"-all; {other if is_short else 'a parameter of the task: --set KEY=VALUE'}"
        return UsageError(f"{path} has no option {option}.{meant}", hint=hint)
    message = re.sub(r"is not a valid int( range)?\.", "is not a whole number.", error.format_message())
    if context and getattr(getattr(error, "param", None), "param_type_name", None) == "argument":
        usage = " ".join((path, *context.command.collect_usage_pieces(context)))  # the order is often what was wrong
        return UsageError(message, hint=f"{path} --help; usage: {usage}")
    return UsageError(message, hint=f"{path} --help")
