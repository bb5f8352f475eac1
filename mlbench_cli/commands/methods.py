"""`mlbench methods`: how ranks can communicate."""

from typing import Annotated, TypedDict

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.runs.methods import use_method_file
from task_images.comm.door import REGISTERED
from task_images.comm.methods import AXES, MethodError
from task_images.comm.presets import PRESETS, list_companions, register_installed, resolve


class MethodDocument(TypedDict):
    """One method, as `-o json` prints it."""

    name: str
    summary: str
    axes: dict[str, str]
    bytes_sent: str
    source: str
    reaches_goals: bool
    note: str
    combines_with: dict[str, list[str]]


def complete_methods(incomplete: str) -> list[str]:
    """Names of methods that begin so."""
    return [name for name in PRESETS if name.startswith(incomplete)]


def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[METHOD]", help="show this method with its axes", autocompletion=complete_methods),
    ] = None,
    method_path: Annotated[
        str | None, typer.Option("--method-path", metavar="FILE.py", help="file with your own method, listed as well")
    ] = None,
    output: Output = Format.text,
) -> None:
    """List communication methods, or show one method with its axes and valid combinations."""
    try:
        register_installed()
        use_method_file(method_path)
    except MethodError as error:
        raise UsageError(f"{error.reason}.", hint=error.instead or None) from None
    if name is not None and name not in PRESETS:
        raise NotFoundError(f'There is no method "{name}".{did_you_mean(name, list(PRESETS))}', hint="mlbench methods")
    if output == Format.json:
        found = [_document(each) for each in ([name] if name else PRESETS)]
        console.out_json(found[0] if name else {"methods": found})
        return
    if name is not None:
        _describe(_document(name))
        return
    console.out_table(
        ["METHOD", "WHAT IT DOES", "SENT PER RANK AND STEP"],
        [[each, preset.summary, preset.bytes] for each, preset in PRESETS.items()],
        droppable=["SENT PER RANK AND STEP"],
        wrap=True,
    )
    console.note("\nM: bytes of the gradients, d: their number, P: ranks. Details: mlbench methods METHOD")


def _document(name: str) -> MethodDocument:
    preset = PRESETS[name]
    return {
        "name": name,
        "summary": preset.summary,
        "axes": resolve(name).axes(),
        "bytes_sent": preset.bytes,
        "source": preset.source,
        "reaches_goals": preset.goal,
        "note": preset.note,
        "combines_with": list_companions(name),
    }


def _describe(method: MethodDocument) -> None:
    facts = [
        ("Method", method["summary"]),
        ("Sends", f"{method['bytes_sent']} bytes per rank and step (M bytes of gradients, d numbers, P ranks)"),
        ("Source", method["source"]),
        ("Note", method["note"]),
    ]
    console.out("\n".join(f"{title + ':':<9}{text}" for title, text in facts if text) + "\n")
    if registered := REGISTERED.get(method["name"]):
        console.out_table(
            ["OPTION", "DEFAULT", "RANGE", "MEANING"],
            [
                [f"comm.{name}", f"{option.default:g}", f"{option.low:g} to {option.high:g}", option.help]
                for name, option in registered.options.items()
            ],
            wrap=True,
        )
        return
    console.out_table(
        ["AXIS", "VALUE", "OTHER LEGAL VALUES", "MEANING"],
        [
            [axis.name, method["axes"][axis.name], ", ".join(method["combines_with"].get(axis.name, [])), axis.help]
            for axis in AXES.values()
        ],
        wrap=True,
    )
    console.note("\nAnother value of an axis: --set comm.AXIS=VALUE")
    console.next_step(f"mlbench run my-run 2 --task digits_resnet --method {method['name']}")
