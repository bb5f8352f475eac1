"""Commands whose help names the values of options ("--pull-secret SECRET", "--seed N"), and groups options by panel."""

import os
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

# Panels of options that `--help` leaves to `--help-all`, and the key of a context whose help shows them.
FOLDED = ("Advanced", "On clusters (not on local)")
HELP_ALL = "mlbench.help_all"
# Options whose last word does not name the value.
_NAMES = {
    "--aad": "ID",
    "--admin": "ARN",
    "--allow-from": "CIDR",
    "--identity": "ID",
    "--load": "IMAGE",
    "--permissions-boundary": "ARN",
    "--registry_name": "NAME",
    "--subnet": "ID",
    "--subnets": "ID,ID",
}


class PanelCommand(TyperCommand):
    """A command whose help groups options by panel; Typer does so only in its slow, colored help.

    A command with the option --help-all shows only arguments, its plain options and its first panel; --help-all shows
    every panel.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line, without Typer's braces around required ones."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options below the headings of their panels."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        folds = any("--help-all" in parameter.opts for parameter in self.get_params(ctx)) and not ctx.meta.get(HELP_ALL)
        folded = {name: panels.pop(name) for name in FOLDED if name in panels} if folds else {}
        for panel in sorted(panels, key=FOLDED.__contains__):  # what is rarely needed comes last
            with formatter.section(panel):
                formatter.write_dl(panels[panel])
        if folded:
            with formatter.section(f"{sum(map(len, folded.values()))} more options"):
                formatter.write_text(f"{ctx.command_path} --help-all")


def build_command(target: typer.Typer) -> Any:
    """The command of a Typer, as Typer's own `get_command` builds it, with names instead of "<str>" and "<int>", and
    with ~ in paths as the home folder: bash leaves it alone in --to=~/x."""
    command = get_command(target)
    _complete(command)
    return command


def _complete(command: Any) -> None:
    for option in command.params:
        kind = str(getattr(option.type, "name", ""))
        if kind in ("path", "file", "directory"):
            option.type.convert = _below_home(option.type.convert)
        if option.metavar is None and option.param_type_name == "option" and not option.is_flag and kind != "choice":
            long = [name for name in option.opts if name.startswith("--")]
            name = _NAMES.get(long[-1], long[-1].rpartition("-")[2].upper())
            option.metavar = "N" if kind.startswith(("int", "float")) else name
    for inner in getattr(command, "commands", {}).values():
        _complete(inner)


def _below_home(convert: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, *more: convert(os.path.expanduser(value), *more)
