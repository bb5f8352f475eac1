"""The rights that each command needs of a cloud, from the file rights.json of its provider."""

import json
from pathlib import Path

from mlbench_cli.errors import UsageError, did_you_mean


def load_rights(provider: str) -> dict[str, list[str]]:
    """The rights that each command needs, by its name. Tests compare them with the recorded calls.

    Besides the command's own calls they hold what the cloud does for it with the caller's rights.
    """
    text = Path(__file__).with_name(provider).joinpath("rights.json").read_text("utf-8")
    rights: dict[str, list[str]] = json.loads(text)
    return rights


def list_rights(provider: str, command: str | None, called: str) -> list[str]:
    """The rights for one command, or without one for all, sorted. `called` names them in errors: "rights of AWS".

    Raises UsageError for a command that asks nothing of the cloud.
    """
    rights = load_rights(provider)
    if command is None:
        return sorted({name for names in rights.values() for name in names})
    if command not in rights:
        raise UsageError(
            f'"{command}" is not a command that needs {called}.{did_you_mean(command, list(rights))}',
            hint=f"--for: {', '.join(rights)}",
        )
    return sorted(rights[command])
