"""What the author of an archive chose, how it is shown, and how it is refused."""

from typing import Any, cast

import pytest

from mlbench_cli.api.repetition import AuthorsProgram, refuse_program, refuse_to_reproduce, repeat_archive
from mlbench_cli.api.workspace import Workspace
from mlbench_cli.errors import UsageError
from mlbench_cli.runs.request import Request

COMMAND = ("command", "python train.py")
DATA = ("data_dir", "/data")


def test_a_program_is_shown_with_its_choices_and_without_control_characters() -> None:
    program = AuthorsProgram("a\nb.zip", (COMMAND, ("image", "x\x1b[2Jy")))
    first, *lines = str(program).splitlines()
    assert first.endswith("b.zip (not signed by an allowed signer) asks to run what its author chose:")
    assert lines[0] == "  command: python train.py"
    assert len(lines) == 2
    assert "\x1b" not in lines[1]


@pytest.mark.parametrize(
    ("choices", "found"), [((COMMAND,), False), ((COMMAND, ("template_dir", "/t")), True), ((), False)]
)
def test_manifests_are_only_rendered_from_templates_that_the_author_names(choices: Any, found: bool) -> None:
    assert AuthorsProgram("a.zip", choices).uses_templates is found


def test_a_program_that_nobody_agreed_to_is_refused_with_what_it_does() -> None:
    with pytest.raises(UsageError, match=r"  command: python train\.py\nIt was not run\."):
        refuse_program(AuthorsProgram("a.zip", (COMMAND,)))


@pytest.mark.parametrize(
    ("choices", "option"), [((DATA,), "--data-dir FOLDER"), ((COMMAND,), "--with NAME"), ((COMMAND, DATA), "--with")]
)
def test_a_reproduction_asks_for_the_data_only_if_nothing_else_was_chosen(choices: Any, option: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_to_reproduce(AuthorsProgram("a.zip", choices))
    assert caught.value.hint is not None
    assert option in caught.value.hint


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(name="x", workers=(2,)), "a number of workers would change it"),
        (Request(name="x", task="allreduce"), "--task would change it"),
        (Request(seed=0), "--seed would change it"),
    ],
)
def test_an_option_that_would_change_a_repeated_run_is_refused_before_the_archive_is_opened(
    request_: Request, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        repeat_archive(cast(Workspace, None), "/nowhere.zip", request_)
