"""`mlbench help [TOPIC | COMMAND]`: the commands of a topic, or the options of a command."""

from typing import Annotated

import typer

from mlbench_cli import commands, console
from mlbench_cli.commands._common import beginning
from mlbench_cli.config.file import SETTINGS, config_file, find_default
from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.runs.request import describe_rare


def _complete_topics(incomplete: str) -> list[str]:
    return beginning((*commands.TOPICS, *commands.names()), incomplete)


def show_help(
    context: typer.Context,
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="a topic or a command", autocompletion=_complete_topics)
    ] = None,
) -> None:
    """Show the everyday commands, the commands of a topic, or the options of a command.

    Topics: runs, results, clusters, settings, defaults, run-settings, exit-codes.
    """
    if topic == "defaults":
        console.out(_describe_defaults(), raw=True)
        return
    if topic == "run-settings":
        table = console.format_table(["SETTING", "MEANING"], describe_rare(), width=80, wrap=True)
        console.out(f"Rarely needed settings of mlbench run, as --set run.KEY=VALUE:\n\n{table}", raw=True)
        return
    if topic is None or topic in commands.TOPICS:
        console.out(commands.help_text(topic).rstrip(), raw=True)
        return
    if commands.find(topic) is None:
        near = did_you_mean(topic, [*commands.TOPICS, *commands.names()])
        raise UsageError(f'There is no topic or command "{topic}".{near}', hint="mlbench help")
    root = context.find_root()
    command = root.command.get_command(root, topic)  # type: ignore[attr-defined]
    with command.make_context(topic, [], parent=root, resilient_parsing=True) as inner:
        console.out(command.get_help(inner), raw=True)


def _describe_defaults() -> str:
    """The options whose defaults a user can set, with their values now and where these come from."""
    path = config_file()
    rows = [
        [setting.key, default.value if default else f"({setting.built_in})", default.origin if default else "built in"]
        for setting in SETTINGS.values()
        for default in [find_default(setting.key)]
    ]
    table = console.format_table(["KEY", "VALUE", "FROM"], rows, width=80, wrap=True)
    return (
        f"Defaults of options:\n\n{table}\n\n"
        f"Config file: {path}{'' if path.exists() else ' (does not exist yet)'}\n"
        'It is TOML, with a text for each key, e.g.  timeout = "2h"\n'
        "Environment variables are MLBENCH_KEY, e.g. MLBENCH_DATA_DIR.\n"
        "Flags win over the file of -f, that over the environment, that over this file."
    )
