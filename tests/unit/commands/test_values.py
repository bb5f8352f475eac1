"""The help of every command names what the value of an option is."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.main import get_command

from mlbench_cli.app import app
from mlbench_cli.commands import names


def list_commands(command: Any, context: Any) -> Iterator[Any]:
    """The command and all below it."""
    yield command
    inner = command.list_commands(context) if hasattr(command, "list_commands") else ()
    for name in inner:
        yield from list_commands(command.get_command(context, name), context)


@pytest.mark.parametrize("name", names())
def test_help_names_the_value_of_every_option(name: str) -> None:
    group: Any = get_command(app)
    context = typer.Context(group)
    for command in list_commands(group.get_command(context, name), context):
        for option in command.params:
            shown = option.make_metavar(context)
            assert not any(kind in shown for kind in ("<str>", "<int", "<float", "<path>")), option.opts


def test_a_value_is_named_by_the_last_word_of_its_option_or_is_a_number() -> None:
    group: Any = get_command(app)
    context = typer.Context(group)
    gke = group.get_command(context, "create-cluster").get_command(context, "gke")
    named = {option.opts[0]: option.metavar for option in gke.params}
    assert (named["--service-account"], named["--num-gpus"], named["--allow-from"]) == ("ACCOUNT", "N", "CIDR")
    assert named["--spot"] is None
