"""`mlbench pins`: the versions that mlbench chooses itself, and until when they are supported."""

from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.errors import TaskFailedError
from providers.pins import SOON_DAYS, Pin, list_pins, user_pin_file


def pins(
    check: Annotated[
        bool, typer.Option("--check", help=f"exit with 7 if the support of a version ends within {SOON_DAYS} days")
    ] = False,
    output: Output = Format.text,
) -> None:
    """List the versions of add-ons, device plugins and node images that mlbench chooses.

    All other versions are the defaults of the clouds. Entries of a pins.toml in the config folder take precedence.
    """
    found = list_pins()
    ending = [pin for pin in found if pin.ends_soon()]
    ends = {f"{pin.group} {pin.kubernetes} on {pin.ends}": None for pin in ending}
    text = f"Support of these versions ends within {SOON_DAYS} days, or has ended: {', '.join(ends)}."
    hint = f"Pin versions for a newer Kubernetes in {user_pin_file()}"
    error = TaskFailedError(text, hint=hint) if check and ending else None
    if output is Format.json:
        console.out_json({"pins": [_document(pin) for pin in found]}, error)
    else:
        rows = [[pin.group, pin.part, pin.kubernetes, pin.version, str(pin.ends or "-"), _note(pin)] for pin in found]
        console.out_table(
            ["GROUP", "PART", "KUBERNETES", "VERSION", "SUPPORTED UNTIL", "NOTE"],
            rows,
            droppable=["NOTE", "SUPPORTED UNTIL"],
        )
        console.note(f"Your versions take precedence: {user_pin_file()}")
    if error is not None:
        raise error
    if ending:
        console.warn(text)


def _note(pin: Pin) -> str:
    return ", ".join(word for word in ("yours" if pin.is_own else "", "ends soon" if pin.ends_soon() else "") if word)


def _document(pin: Pin) -> dict[str, object]:
    return {
        "group": pin.group,
        "part": pin.part,
        "kubernetes": pin.kubernetes,
        "version": pin.version,
        "supported_until": None if pin.ends is None else str(pin.ends),
        "ends_soon": pin.ends_soon(),
        "own": pin.is_own,
    }
