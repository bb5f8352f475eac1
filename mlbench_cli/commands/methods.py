"""`mlbench methods`: how ranks can communicate."""

import shlex
from typing import Annotated, TypedDict

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._completion import complete_methods
from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from task_images.methods.base import MethodError
from task_images.methods.catalog import find_class, list_names, load_file, load_installed


class OptionDocument(TypedDict):
    """One option of a method."""

    default: str
    values: str
    help: str


class MethodDocument(TypedDict):
    """One method, as `-o json` prints it."""

    name: str
    summary: str
    options: dict[str, OptionDocument]
    bytes_sent: str
    source: str
    reaches_goals: bool
    note: str


def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[METHOD]", help="show this method with its options", autocompletion=complete_methods),
    ] = None,
    method_path: Annotated[
        str | None, typer.Option("--method-path", metavar="FILE.py", help="file with your own method, listed as well")
    ] = None,
    output: Output = Format.text,
) -> None:
    """List communication methods, or show one method with its options."""
    own = ""
    try:
        load_installed()
        if method_path is not None:
            own = load_file(method_path).name
    except MethodError as error:
        raise UsageError(f"{error.reason}.", hint=error.instead or None) from None
    if name is not None and name not in list_names():
        raise NotFoundError(f'There is no method "{name}".{did_you_mean(name, list_names())}', hint="mlbench methods")
    found = [_document(each) for each in ([name] if name else list_names())]
    if output == Format.json:
        console.out_json(found[0] if name else {"methods": found})
    elif name is not None:
        _describe(
            found[0], f"--method-path {shlex.quote(method_path)}" if method_path and name == own else f"--method {name}"
        )
    else:
        console.out_table(
            ["METHOD", "WHAT IT DOES", "SENT PER RANK AND STEP"],
            [[each["name"], each["summary"], each["bytes_sent"]] for each in found],
            droppable=["SENT PER RANK AND STEP"],
            wrap=True,
        )
        console.note("\nM: bytes of the gradients, d: their number, P: ranks. Details: mlbench methods METHOD")


def _document(name: str) -> MethodDocument:
    method = find_class(name)
    return {
        "name": name,
        "summary": method.summary,
        "options": {
            each: {"default": str(option.default), "values": option.range, "help": option.help}
            for each, option in method.list_options().items()
        },
        "bytes_sent": method.formula,
        "source": method.source,
        "reaches_goals": method.reaches_goals,
        "note": method.note,
    }


def _describe(method: MethodDocument, choice: str) -> None:
    """Show a method, and the option with which a run has it."""
    facts = [
        ("Method", method["summary"]),
        ("Sends", f"{method['bytes_sent']} bytes per rank and step (M bytes of gradients, d numbers, P ranks)"),
        ("Source", method["source"]),
        ("Note", method["note"]),
    ]
    console.out("\n".join(f"{title + ':':<9}{text}" for title, text in facts if text) + "\n")
    if not method["options"]:
        return
    console.out_table(
        ["OPTION", "DEFAULT", "VALUES", "MEANING"],
        [
            [f"comm.{name}", option["default"], option["values"], option["help"]]
            for name, option in method["options"].items()
        ],
        wrap=True,
    )
    console.note("\nAnother value of an option: --set comm.OPTION=VALUE")
    console.next_step(f"mlbench run my-run 2 --task digits_resnet {choice}")
