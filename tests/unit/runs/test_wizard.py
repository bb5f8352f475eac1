"""The questions of `mlbench run` in their order: what is asked, with which choices and default, and what is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import console
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.runs import questions, wizard
from mlbench_cli.runs.launch import Machine
from mlbench_cli.runs.request import Request

ESC = "ESC"
FAR = Cluster("far", "gke", "creating")
NAME, SIZES = "Name of the run [my-run]: ", "Numbers of workers, one run each [1]: "
DIGITS = [("Task", "digits_resnet"), ("Preset", "tiny")]


class Person:
    """Answers questions in turn: (the question or the title of a menu, the answer); "" is the default."""

    def __init__(self, script: list[tuple[str, str]]) -> None:
        self.script = list(script)
        self.menus: dict[str, list[Any]] = {}
        self.defaults: dict[str, str] = {}
        self.notes: list[str] = []

    def ask(self, question: str, *, back: bool) -> str:
        assert back
        return self._answer(question)

    def choose(self, title: str, options: list[Any], default: int, *, back: bool) -> int:
        assert back
        self.menus[title] = [tuple(option) for option in options]
        self.defaults[title] = options[default].name
        answer = self._answer(title)
        return [option.name for option in options].index(answer) if answer else default

    def _answer(self, question: str) -> str:
        assert self.script, f"an unexpected question: {question}"
        expected, answer = self.script.pop(0)
        assert question == expected
        if answer == ESC:
            raise console.Back
        return answer


Answer = Callable[..., tuple[Person, Request, Cluster]]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Ask a person on a machine without GPUs and data; the person, the request, and its cluster."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("mlbench_cli.runs.launch.local_machine", lambda: Machine(2, 0, None))

    def complete(
        *script: tuple[str, str],
        clusters: Any = (LOCAL,),
        current: Cluster = LOCAL,
        taken: Any = (),
        add_defaults: Any = None,
        **given: Any,
    ) -> tuple[Person, Request, Cluster]:
        person = Person(list(script))
        for name in ("ask", "choose"):
            monkeypatch.setattr(console, name, getattr(person, name))
        monkeypatch.setattr(console, "note", person.notes.append)
        add = add_defaults or (lambda request, _: request)
        request, cluster = wizard.complete(Request(**given), clusters, current, taken, add)
        assert person.script == []
        return person, request, cluster

    return complete


def test_everything_is_asked_in_this_order(answer: Answer) -> None:
    person, request, cluster = answer((NAME, "mine"), *DIGITS, (SIZES, "1, 2"), ("Backend", "mpi"))
    assert request == Request(name="mine", workers=(1, 2), task="digits_resnet", preset="tiny", backend="mpi")
    assert cluster == LOCAL
    assert person.menus["Task"][-1] == ("custom", "a command of your own", "")
    assert ("mnist", "The tutorial's small convolutional network on MNIST", "downloads 12 MB") in person.menus["Task"]
    assert person.menus["Preset"][0] == ("spec", "as in the benchmark's specification", "")
    assert [name for name, *_ in person.menus["Backend"]] == ["gloo", "mpi", "jax", "custom"]
    assert person.menus["Backend"][-1] == ("custom", "another one, by name", "")
    assert person.defaults == {"Task": person.menus["Task"][0][0], "Preset": "spec", "Backend": "gloo"}


def test_answers_are_the_defaults_of_the_next_time(answer: Answer) -> None:
    answer((NAME, ""), *DIGITS, (SIZES, ""), ("Backend", "mpi"))
    person, request, _ = answer((NAME, ""), ("Task", ""), ("Preset", ""), (SIZES, ""), ("Backend", ""))
    assert request == Request(name="my-run", workers=(1,), task="digits_resnet", preset="tiny", backend="mpi")
    person, *_ = answer((NAME, ""), ("Task", "allreduce"), ("Preset", ""), (SIZES, ""), ("Backend", ""))
    assert person.defaults["Preset"] == "spec"  # the preset was one of another task


def test_a_request_with_a_program_is_asked_only_for_name_and_sizes(answer: Answer) -> None:
    _, request, _ = answer((NAME, ""), (SIZES, "3"), task="digits_resnet", clusters=(LOCAL, FAR))
    assert request == Request(name="my-run", workers=(3,), task="digits_resnet")
    _, request, _ = answer(name="x", workers=(2,), command="true")
    assert request == Request(name="x", workers=(2,), command="true")


def test_what_was_given_is_not_asked(answer: Answer) -> None:
    person, request, _ = answer(("Task", "mnist"), name="x", workers=(2,), preset="tiny", backend="gloo")
    assert request == Request(name="x", workers=(2,), task="mnist", preset="tiny", backend="gloo")
    assert ("mnist", "The tutorial's small convolutional network on MNIST", "") in person.menus["Task"]


def test_answers_that_cannot_be_kept_are_a_warning(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(console, "warn", warnings.append)
    (tmp_path / "home").write_text("a file in place of the folder")
    _, request, _ = answer((SIZES, ""), name="x", command="true")
    assert request.workers == (1,)
    assert len(warnings) == 1
    assert warnings[0].startswith("The answers could not be saved to ")


# --- names and sizes ------------------------------------------------------------------------------------------------


def test_a_name_that_is_taken_is_asked_again(answer: Answer) -> None:
    script = [("Name of the run [my-run2]: ", "x"), ("Name of the run [my-run2]: ", "y")]
    person, request, _ = answer(*script, workers=(1,), command="true", taken=["x-1", "my-run-1"])
    assert request.name == "y"
    assert person.notes == ['There is already a run "x-1".']
    # With other sizes the name is free.
    _, request, _ = answer((NAME, "x"), workers=(2,), command="true", taken=["x-1"])
    assert request.name == "x"


@pytest.mark.parametrize("text", ["0", "-1", "a", "1.5", "4097", ",", "²"])
def test_sizes_are_numbers_of_workers(answer: Answer, text: str) -> None:
    person, request, _ = answer((SIZES, text), (SIZES, "4096,1"), name="x", command="true")
    assert request.workers == (4096, 1)
    assert person.notes == ["Enter numbers from 1 to 4096, e.g. 1 2 4."]


def test_sizes_whose_names_are_taken_are_asked_again(answer: Answer) -> None:
    person, request, _ = answer((SIZES, "1 2"), (SIZES, "2 2"), (SIZES, "4"), name="x", command="true", taken=["x-1"])
    assert request.workers == (4,)
    assert [note.partition(".")[0] for note in person.notes] == [
        'There is already a run "x-1"',
        "2 workers are given twice; both runs would be named x-2",
    ]


# --- clusters and devices -------------------------------------------------------------------------------------------


def test_one_of_several_clusters_is_chosen(answer: Answer) -> None:
    added: list[tuple[str | None, str]] = []

    def add(request: Request, cluster: Cluster) -> Request:
        added.append((request.cluster, cluster.name))
        return request

    script = [(NAME, ""), ("Cluster", "far"), *DIGITS, (SIZES, ""), ("Backend", "")]
    person, request, cluster = answer(*script, clusters=(LOCAL, FAR), add_defaults=add)
    assert (request.cluster, cluster) == ("far", FAR)
    assert person.menus["Cluster"] == [("local", "local, ready", ""), ("far", "gke, creating", "not ready")]
    assert person.defaults["Cluster"] == "local"
    assert added == [("far", "far")]
    script[1] = ("Cluster", "")
    person, request, cluster = answer(*script, clusters=(LOCAL, FAR), current=FAR)
    assert (person.defaults["Cluster"], request.cluster, cluster) == ("far", "far", FAR)
    person, *_ = answer(*script, clusters=(LOCAL, FAR), current=Cluster("gone", "gke"))
    assert person.defaults["Cluster"] == "local"


def test_a_named_cluster_is_not_asked_for(answer: Answer) -> None:
    script = [(NAME, ""), *DIGITS, (SIZES, ""), ("Backend", "")]
    _, request, cluster = answer(*script, clusters=(LOCAL, FAR), current=FAR, cluster="far")
    assert (request.cluster, cluster) == ("far", FAR)


def test_defaults_of_the_cluster_are_no_answer_to_go_back_to(answer: Answer) -> None:
    def add(request: Request, _: Cluster) -> Request:
        return Request(**{**vars(request), "timeout": "1h"})

    script = [(NAME, "first"), ("Task", ESC), (NAME, "second"), *DIGITS, (SIZES, ""), ("Backend", "")]
    _, request, _ = answer(*script, add_defaults=add)
    assert (request.name, request.timeout) == ("second", "1h")


def test_a_device_is_chosen_only_where_there_are_gpus(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "has_gpus", lambda _: True)
    script = [(NAME, ""), *DIGITS, ("Device", ""), (SIZES, ""), ("Backend", "")]
    person, request, _ = answer(*script)
    assert (request.gpu, request.backend) == (True, "nccl")
    assert person.menus["Device"] == [("gpu", "", ""), ("cpu", "", "")]
    assert [name for name, *_ in person.menus["Backend"]] == ["gloo", "nccl", "mpi", "jax", "custom"]
    script[3] = ("Device", "cpu")
    person, request, _ = answer(*script)
    assert (request.gpu, request.backend) == (False, "gloo")
    assert "nccl" not in [name for name, *_ in person.menus["Backend"]]
    _, request, _ = answer((NAME, ""), *DIGITS, (SIZES, ""), ("Backend", ""), gpu=False)
    assert request.gpu is False


# --- a program of one's own -----------------------------------------------------------------------------------------


def test_a_command_on_this_machine_needs_no_image(answer: Answer) -> None:
    script = [(NAME, ""), ("Task", "custom"), ("Command: ", ""), ("Command: ", "python x.py")]
    person, request, _ = answer(*script, (SIZES, ""), ("Backend", ""))
    assert request == Request(name="my-run", workers=(1,), command="python x.py", backend="gloo")
    assert person.notes == ["Please enter a value."]
    assert [name for name, *_ in person.menus["Backend"]] == ["gloo", "mpi", "custom"]
    _, request, _ = answer((NAME, ""), ("Task", ""), ("Command [python x.py]: ", ""), (SIZES, ""), ("Backend", ""))
    assert request.command == "python x.py"


def test_a_command_on_a_cluster_needs_an_image(answer: Answer) -> None:
    script = [
        (NAME, ""),
        ("Task", "custom"),
        ("Image: ", "me/mine:1"),
        ("Command: ", "run"),
        (SIZES, ""),
        ("Backend", ""),
    ]
    person, request, _ = answer(*script, clusters=(FAR,), current=FAR)
    assert (request.image, request.command, request.task) == ("me/mine:1", "run", None)
    assert person.menus["Task"][-1] == ("custom", "an image and a command of your own", "")
    assert ("mnist", "The tutorial's small convolutional network on MNIST", "") in person.menus["Task"]
    _, request, _ = answer(
        (NAME, ""), ("Command [run]: ", ""), (SIZES, ""), ("Backend", ""), clusters=(FAR,), current=FAR, image="other"
    )
    assert (request.image, request.command) == ("other", "run")


SWITCH = "Run the command on all workers (otherwise on the first only)"


def test_a_backend_of_ones_own_has_a_name_and_may_start_the_others_itself(answer: Answer) -> None:
    own = [(NAME, ""), ("Task", "custom"), ("Command: ", "run"), (SIZES, ""), ("Backend", "custom")]
    script = [*own, ("Name of the backend: ", "mine"), (f"{SWITCH} [y/N]: ", "maybe"), (f"{SWITCH} [y/N]: ", "YES")]
    person, request, _ = answer(*script)
    assert (request.custom_backend, request.run_on_all, request.backend) == ("mine", True, None)
    assert person.notes == ["Please answer y or n."]
    own[1:3] = [("Task", ""), ("Command [run]: ", "")]
    own[-1] = ("Backend", "")
    _, request, _ = answer(*own, ("Name of the backend [mine]: ", ""), (f"{SWITCH} [Y/n]: ", ""))
    assert (request.custom_backend, request.run_on_all) == ("mine", True)
    _, request, _ = answer(*own, ("Name of the backend [mine]: ", "x"), (f"{SWITCH} [Y/n]: ", "n"))
    assert (request.custom_backend, request.run_on_all) == ("x", False)


def test_a_task_of_the_catalog_runs_on_all_workers_whatever_the_backend(answer: Answer) -> None:
    script = [(NAME, ""), *DIGITS, (SIZES, ""), ("Backend", "custom"), ("Name of the backend: ", "mine")]
    _, request, _ = answer(*script)
    assert (request.custom_backend, request.run_on_all) == ("mine", None)


# --- data -----------------------------------------------------------------------------------------------------------


def test_missing_data_are_asked_for_until_they_are_found(answer: Answer, tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    for folder in (empty, full):
        folder.mkdir()
    (full / "wiki.train.tokens").touch()
    question = "Folder with the data: "
    script = [(NAME, ""), ("Task", "wikitext2_awd_lstm"), ("Preset", "spec")]
    folders = [(question, str(tmp_path / "none")), (question, str(empty)), (question, str(full))]
    person, request, _ = answer(*script, *folders, (SIZES, ""), ("Backend", ""))
    assert request.data_dir == str(full)
    assert person.notes[0].startswith("wikitext2_awd_lstm needs: ")
    missing = "wiki.train.tokens (or wikitext-2-v1.zip)"
    assert person.notes[1:] == [f"There is no {missing} in {folder}." for folder in (tmp_path / "none", empty)]
    assert ("spec", "as in the benchmark's specification", "data missing") in person.menus["Preset"]
    script[-1] = ("Preset", "tiny")
    _, request, _ = answer(*script, (SIZES, ""), ("Backend", ""))
    assert request.data_dir is None
    _, request, _ = answer((NAME, ""), ("Task", "mnist"), ("Preset", "spec"), (SIZES, ""), ("Backend", ""))
    assert request.data_dir is None  # they are downloaded


def test_data_on_a_cluster_are_not_asked_for(answer: Answer) -> None:
    script = [(NAME, ""), ("Task", "wikitext2_awd_lstm"), ("Preset", "spec"), (SIZES, ""), ("Backend", "")]
    _, request, _ = answer(*script, clusters=(FAR,), current=FAR)
    assert request.data_dir is None


# --- back -----------------------------------------------------------------------------------------------------------


def test_esc_goes_back_to_the_question_before(answer: Answer) -> None:
    script = [
        *[(NAME, ESC), (NAME, "first"), ("Task", "mnist"), ("Preset", ESC), ("Task", "custom"), ("Command: ", ESC)],
        *[("Task", "digits_resnet"), ("Preset", "tiny"), (SIZES, ESC), ("Preset", "spec"), (SIZES, "2")],
        *[("Backend", "custom"), ("Name of the backend: ", ESC), ("Backend", "mpi")],
    ]
    _, request, _ = answer(*script)
    assert request == Request(name="first", workers=(2,), task="digits_resnet", preset="spec", backend="mpi")
