"""`mlbench completion SHELL`: the shell completion script for commands, options and names."""

from enum import StrEnum
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output


class Shell(StrEnum):
    """A shell that can be taught to complete commands."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


_FILES = {
    Shell.bash: '~/.bashrc: eval "$(mlbench completion bash)"',
    Shell.zsh: '~/.zshrc, behind compinit: eval "$(mlbench completion zsh)"',
    Shell.fish: "~/.config/fish/config.fish: mlbench completion fish | source",
}


def completion(
    shell: Annotated[Shell, typer.Argument(help="shell: bash, zsh or fish")], output: Output = Format.text
) -> None:
    """Print the shell completion script for commands, options, tasks, presets, backends, clusters and runs."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(prog_name="mlbench", complete_var="_MLBENCH_COMPLETE", shell=shell.value)
    if output == Format.json:
        console.out_json({"shell": shell.value, "script": script})
        return
    console.out(script.rstrip())
    if console.interactive():
        console.note(f"\nAdd this to {_FILES[shell]}")
