"""`mlbench config`: show and change the defaults of other commands."""

from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, print_answer
from mlbench_cli.commands._values import PanelCommand
from mlbench_cli.config import file as settings_file
from mlbench_cli.config.file import SETTINGS, Setting
from mlbench_cli.errors import NotFoundError
from mlbench_cli.storage.store import Store

Key = Annotated[
    str,
    typer.Argument(
        metavar="KEY",
        help=f"one of {', '.join(SETTINGS)}",
        autocompletion=lambda incomplete: [key for key in SETTINGS if key.startswith(incomplete)],
    ),
]

config = typer.Typer(rich_markup_mode=None, add_completion=False)


@config.callback(invoke_without_command=True)
def show(context: typer.Context, output: Output = Format.text) -> None:
    """Show the defaults of options and where they come from; change them with set and unset.

    Precedence: flags, the file of --file, environment variables, the config file.
    """
    if context.invoked_subcommand is not None:
        return
    documents = {key: _document(setting) for key, setting in SETTINGS.items()}
    path = settings_file.config_file()
    if output == Format.json:
        console.out_json({"file": str(path), "exists": path.exists(), "settings": documents})
        return
    console.out_table(
        ["KEY", "VALUE", "FROM", "VARIABLE", "MEANING"],
        [
            [key, entry["value"] or f"({SETTINGS[key].built_in})", entry["origin"], entry["variable"], entry["help"]]
            for key, entry in documents.items()
        ],
        droppable=["MEANING", "VARIABLE"],
    )
    console.note(f"\nConfig file: {path}{'' if path.exists() else ' (does not exist yet)'}")
    console.note("Change it with: mlbench config set KEY VALUE")


@config.command(cls=PanelCommand)
def get(key: Key, output: Output = Format.text) -> None:
    """Print the value of one setting. Exit code 4 if neither environment nor config file set it."""
    setting = settings_file.find_setting(key)
    entry = _document(setting)
    if entry["value"] is None:
        raise NotFoundError(
            f'"{setting.key}" is not set; built in: {setting.built_in}.',
            hint=f"mlbench config set {setting.key} VALUE",
        )
    print_answer(output, {"key": setting.key, **entry}, str(entry["value"]))


@config.command("set", cls=PanelCommand)
def set_(
    key: Key,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="new value")],
    output: Output = Format.text,
) -> None:
    """Write a setting to the config file."""
    default = settings_file.set_value(key, value)
    setting = settings_file.find_setting(key)
    if setting.key == "cluster" and value not in [item.name for item in Store(notice=console.note).clusters()]:
        console.warn(f'There is no cluster "{value}" yet; runs fail until there is one.')
    print_answer(
        output, {"key": setting.key, **_document(setting)}, f"{setting.key} = {default.value} ({default.origin})"
    )
    if settings_file.from_environment(setting.key) is not None:
        console.warn(f"The environment variable {setting.variable} is also set and takes precedence.")


@config.command(cls=PanelCommand)
def unset(key: Key, output: Output = Format.text) -> None:
    """Remove a setting from the config file."""
    removed = settings_file.unset_value(key)
    setting = settings_file.find_setting(key)
    text = f"{setting.key} {'is no longer' if removed else 'was not'} set in {settings_file.config_file()}."
    print_answer(output, {"key": setting.key, "removed": removed, **_document(setting)}, text)


@config.command(cls=PanelCommand)
def path(output: Output = Format.text) -> None:
    """Print the path of the config file."""
    file = settings_file.config_file()
    print_answer(output, {"file": str(file), "exists": file.exists()}, str(file))


def _document(setting: Setting) -> dict[str, object]:
    default = settings_file.find_default(setting.key)
    return {
        "value": default.value if default else None,
        "source": default.source if default else "built-in",
        "origin": default.origin if default else "built in",
        "built_in": setting.built_in,
        "variable": setting.variable,
        "help": setting.help,
    }
