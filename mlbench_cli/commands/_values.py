"""Commands whose help names the values of options: "--pull-secret SECRET", "--seed N"."""

from typing import Any

import typer
from typer.main import get_command

# Panels of options that `--help` leaves to `--help-all`, and the key of a context whose help shows them.
FOLDED = ("Advanced", "On clusters (not on local)")
HELP_ALL = "mlbench.help_all"
# Options whose last word does not name the value.
_NAMES = {"--allow-from": "CIDR"}


def build_command(target: typer.Typer) -> Any:
    """The command of a Typer, as Typer's own `get_command` builds it, with names instead of "<str>" and "<int>"."""
    command = get_command(target)
    _name_values(command)
    return command


def _name_values(command: Any) -> None:
    for option in command.params:
        kind = str(getattr(option.type, "name", ""))
        if option.metavar is None and option.param_type_name == "option" and not option.is_flag and kind != "choice":
            long = [name for name in option.opts if name.startswith("--")]
            name = _NAMES.get(long[-1], long[-1].rpartition("-")[2].upper())
            option.metavar = "N" if kind.startswith(("int", "float")) else name
    for inner in getattr(command, "commands", {}).values():
        _name_values(inner)
