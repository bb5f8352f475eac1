"""`mlbench run`: what a command line asks for, what it lacks, what is agreed to, saved, warned of and printed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli import console
from mlbench_cli.commands import run as module
from mlbench_cli.commands.run import (
    _agree,
    _complete,
    _explain_plan,
    _find_several,
    _follow,
    _missing,
    _print_submissions,
    _request,
    _save,
    _warn,
)
from mlbench_cli.commands.serve import serve
from mlbench_cli.console import Format
from mlbench_cli.errors import Interrupted, NotFoundError, UsageError
from mlbench_cli.model.run import Outcome
from mlbench_cli.runs.launch import Machine
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import WorkersRule
from tests.unit.results.runs import spec

Captured = pytest.CaptureFixture[str]


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "workers", "options", "request_"),
    [
        ("demo", [1, 2], {}, Request(name="demo", workers=(1, 2))),
        ("demo", None, {"task": "x", "backend": None, "set": []}, Request(name="demo", task="x")),
        (None, None, {}, Request()),
        ("demo", [2], {"gpu": False}, Request(name="demo", workers=(2,), gpu=False)),
    ],
)
def test_options_that_are_not_given_are_left_open(
    name: str | None, workers: list[int] | None, options: dict[str, Any], request_: Request
) -> None:
    assert _request(name, workers, None, options) == request_


def test_a_number_is_no_name_but_may_be_one_of_workers_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 is not a valid run name; NAME comes before the numbers of workers"):
        _request("2", [4], None, {})
    file = tmp_path / "x.yaml"
    file.write_text("name: demo\nworkers: [1]\ntask: digits_resnet\n")
    assert _request("2", [4], file, {}) == Request(name="demo", workers=(2, 4), task="digits_resnet")
    assert _request("other", None, file, {"task": "allreduce"}) == Request(name="other", workers=(1,), task="allreduce")


@pytest.mark.parametrize(
    ("request_", "missing"),
    [
        (Request(), ["name", "number of workers", "task or command"]),
        (Request(name="demo", workers=(1,), task="x"), []),
        (Request(name="demo", workers=(1,), command="true"), []),
        (Request(name="demo", workers=(1,)), ["task or command"]),
        (Request(workers=(1,), task="x"), ["name"]),
        (Request(name="demo", task="x"), ["number of workers"]),
        (Request(name="demo", workers=(1,), matrix={"task": ("x", "y")}), []),
        (Request(name="demo", workers=(1,), matrix={"backend": ("gloo",)}), ["task or command"]),
        (Request(name="demo", workers=(1,), include=({"command": "true"},)), []),
    ],
)
def test_what_a_run_cannot_do_without(request_: Request, missing: list[str]) -> None:
    assert _missing(request_) == missing


class Client:
    """A client with the runs "taken-1", and experiments by name."""

    def __init__(self, **experiments: dict[str, Any]) -> None:
        found = {name: SimpleNamespace(request=request) for name, request in experiments.items()}
        self.store = SimpleNamespace(find_experiment=found.get)

    def iterate_runs(self) -> Any:
        return [SimpleNamespace(name="taken-1")]


@pytest.mark.parametrize(
    ("ask", "terminal", "reason"),
    [(True, False, ", and there is no terminal to prompt on"), (False, True, ""), (False, False, "")],
)
def test_what_is_missing_is_named_where_nobody_can_be_asked(
    monkeypatch: pytest.MonkeyPatch, ask: bool, terminal: bool, reason: str
) -> None:
    monkeypatch.setattr(console, "interactive", lambda: terminal)
    with pytest.raises(UsageError) as caught:
        _complete(Request(name="demo"), cast(Any, Client()), ask=ask, is_dry=False)
    assert caught.value.message == f"No number of workers, no task or command given{reason}."
    assert (caught.value.hint or "").startswith("mlbench run demo 1 2 4 --task TASK")


def test_a_complete_request_stays_as_it_is_and_names_are_checked() -> None:
    whole = Request(name="demo", workers=(1,), task="x")
    assert _complete(whole, cast(Any, Client()), ask=True, is_dry=False) is whole
    with pytest.raises(UsageError):
        _complete(Request(name="Demo", workers=(1,), task="x"), cast(Any, Client()), ask=True, is_dry=False)
    with pytest.raises(UsageError, match="taken"):
        _complete(Request(name="taken"), cast(Any, Client()), ask=False, is_dry=False)
    with pytest.raises(UsageError, match="No number of workers"):
        _complete(Request(name="taken"), cast(Any, Client()), ask=False, is_dry=True)


def test_a_file_of_several_runs_or_their_experiment(tmp_path: Path) -> None:
    several, one = tmp_path / "several.yaml", tmp_path / "one.yaml"
    several.write_text("title: x\nruns:\n  - {name: a, task: allreduce, workers: [1]}\n")
    one.write_text("name: demo\n")
    client: Any = Client(both={"runs": []}, single={"name": "single"})
    assert _find_several(client, None, None, several) == str(several)
    assert _find_several(client, None, None, one) is None
    assert _find_several(client, "both", None, None) == "both"
    assert _find_several(client, "both", [1], None) is None
    assert _find_several(client, "single", None, None) is None
    assert _find_several(client, None, None, None) is None


# --- what is agreed to ------------------------------------------------------------------------------------------------


class Program:
    """What an author chose."""

    def __init__(self, signer: str | None = None, templates: bool = False) -> None:
        self.signer, self.uses_templates = signer, templates

    def __str__(self) -> str:
        return "It runs rm."


@pytest.mark.parametrize(
    ("program", "yes", "trusted", "dry", "flag"),
    [
        (Program("eva"), True, False, False, None),
        (Program("eva"), False, False, False, "--yes"),
        (Program(), True, False, False, "--run-foreign-command"),  # --yes is no answer about strangers
        (Program(), False, True, False, None),
        (Program(), False, False, True, None),
        (Program(templates=True), True, False, True, "--run-foreign-command"),
        (Program("eva", templates=True), True, False, True, None),
    ],
)
def test_a_program_of_an_author_is_agreed_to(
    capsys: Captured, program: Program, yes: bool, trusted: bool, dry: bool, flag: str | None
) -> None:
    agree = {"yes": yes, "is_trusted": trusted, "is_dry": dry}
    if flag is None:
        _agree(cast(Any, program), **agree)
    else:
        with pytest.raises(UsageError, match="Run this") as caught:
            _agree(cast(Any, program), **agree)
        assert caught.value.hint == f"Add {flag} to agree beforehand."
    assert capsys.readouterr().err == "It runs rm.\n"


# --- what is saved ----------------------------------------------------------------------------------------------------


def test_a_request_is_saved_once(tmp_path: Path, capsys: Captured) -> None:
    request, path = Request(name="demo", workers=(1, 2), task="digits_resnet"), tmp_path / "x.yaml"
    _save(request, path, None)
    assert capsys.readouterr().err == f"Repeat: mlbench run -f {path}\n"
    assert _request(None, None, path, {}) == request
    _save(request, path, None)
    with pytest.raises(UsageError, match=r"x\.yaml already exists"):
        _save(Request(name="other", workers=(1,), task="digits_resnet"), path, None)
    assert _request(None, None, path, {}) == request
    with pytest.raises(UsageError, match="--save and --from exclude each other"):
        _save(request, tmp_path / "y.yaml", "archive")
    with pytest.raises(UsageError, match="cannot be written"):
        _save(request, tmp_path / "no" / "y.yaml", None)


# --- what is told -----------------------------------------------------------------------------------------------------


def submission(name: str, *documents: dict[str, Any]) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(name=name), documents=documents)


def test_a_dry_run_prints_scripts_documents_or_json(capsys: Captured) -> None:
    _print_submissions([submission("a-1", {"script": "one\n"}), submission("b-1", {"script": "two\n\n"})], Format.text)
    assert capsys.readouterr().out == "one\n\ntwo\n"
    found = [submission("a-1", {"kind": "Job"}, {"kind": "Service"})]
    _print_submissions(found, Format.text)
    assert capsys.readouterr().out.split() == ["---", "kind:", "Job", "---", "kind:", "Service"]
    _print_submissions(found, Format.json)
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "submissions": [{"run": "a-1", "documents": [{"kind": "Job"}, {"kind": "Service"}]}],
    }


@pytest.mark.parametrize(
    ("runs", "machine", "warnings"),
    [
        ([spec("a-2", 2)], Machine(2, 0), []),
        ([spec("a-4", 4), spec("b-3", 3), spec("c-2")], Machine(2, 0), ["a-4, b-3: more ranks than this machine's 2"]),
        ([spec("a-1", 1, processes_per_worker=3)], Machine(2, 0), ["a-1: more ranks than this machine's 2"]),
        ([spec("a-4", 4, engine="kubernetes")], Machine(2, 0), []),
        ([spec("a-2", 2, device="gpu"), spec("b-1", 1, device="gpu")], Machine(8, 1), ["a-2: ranks share GPUs"]),
        ([spec("a-2", 2)], Machine(8, 1), []),
    ],
)  # fmt: skip
def test_runs_that_say_little_about_scaling(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, runs: list[Any], machine: Machine, warnings: list[str]
) -> None:
    monkeypatch.setattr(module, "local_machine", lambda: machine)
    monkeypatch.setattr(module, "find_too_many_workers", lambda specs: {})
    _warn(runs)
    lines = capsys.readouterr().err.splitlines()
    shown = [line.removesuffix(", so times say little about scaling.").removesuffix(" cores") for line in lines]
    assert shown == [f"Warning: {text}" for text in warnings]


def test_more_ranks_than_are_sensible_are_told_once_for_each_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    rule = WorkersRule(sensible=4, reason="the data are few")
    monkeypatch.setattr(module, "find_too_many_workers", lambda specs: {rule: ["a-8", "b-16"]})
    _warn([])
    assert capsys.readouterr().err == "Warning: a-8, b-16: more than 4 ranks; the data are few.\n"


def opened(*names: str, left: tuple[str, ...] = (), **fields: Any) -> Any:
    """An experiment of runs that ended: those whose name begins with "f" have failed."""
    runs = []
    for name in names:
        outcome = Outcome.FAILED if name[0] == "f" else Outcome.COMPLETED
        record = SimpleNamespace(id=name, name=name)
        finished = None if name in left else SimpleNamespace(run=record, outcome=outcome)
        runs.append(SimpleNamespace(run=record, finished=finished))
    remaining = [run.run for run in runs if run.run.id in left]
    experiment = SimpleNamespace(parallel=fields.get("parallel", 1), require_goal=True)
    plan = SimpleNamespace(runs=runs, left=remaining, experiment=experiment)
    return SimpleNamespace(name="demo", runs=runs, plan=plan, dies_with_client=fields.get("dies", False))


def test_a_resumed_experiment_says_what_is_left_and_what_failed(capsys: Captured) -> None:
    _explain_plan(opened("a-1", "f-1", "f-2", "b-1", left=("b-1",)), True)
    assert capsys.readouterr().err == (
        'Resuming the experiment "demo": 3 of 4 runs have ended, 1 are left.\n'
        "Failed earlier (rerun with --retry-failed): f-1, f-2.\n"
    )
    _explain_plan(opened("a-1"), True)
    assert capsys.readouterr().err.count("\n") == 1
    _explain_plan(opened("f-1"), False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("parallel", "left", "dies", "is_queued"),
    [
        (1, ("a-1", "b-1"), False, False),
        (2, ("a-1", "b-1"), False, True),
        (2, ("a-1",), False, False),
        (2, ("a-1", "b-1"), True, False),
    ],
)
def test_several_runs_at_a_time_are_left_to_a_queue(
    monkeypatch: pytest.MonkeyPatch, parallel: int, left: tuple[str, ...], dies: bool, is_queued: bool
) -> None:
    monkeypatch.setattr(module, "wait_for_queue", lambda opened, *, require_goal: ("queue", require_goal))
    monkeypatch.setattr(module, "follow_all", lambda opened, *, require_goal, logs: ("client", require_goal, logs))
    found: Any = _follow(opened("a-1", "b-1", left=left, parallel=parallel, dies=dies), True)
    assert found == (("queue", True) if is_queued else ("client", True, True))


# --- serve ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"certificate": Path("c")}, UsageError, "--tls-cert and --tls-key must be given together"),
        ({"key": Path("k")}, UsageError, "--tls-cert and --tls-key must be given together"),
        ({"certificate": Path("/no/c"), "key": Path("/no/k")}, NotFoundError, "There is no file /no/c"),
        ({"host": "0.0.0.0"}, UsageError, r"--host 0\.0\.0\.0: without TLS, anyone"),
        ({"public_url": "https://a.example"}, UsageError, "--public-url needs --token-file"),
        ({"public_url": "https://a.example/x"}, UsageError, "is not a URL of scheme, host and port"),
    ],
)
def test_a_dashboard_that_would_not_be_safe_is_not_served(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    pytest.importorskip("uvicorn")
    with pytest.raises(kind, match=message):
        serve(**options)


def test_an_interrupt_is_not_taken_for_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "interactive", lambda: True)
    for answer, is_agreed in (("y", True), ("YES", True), ("", False), ("n", False), ("yess", False)):
        monkeypatch.setattr(console, "ask", lambda question, answer=answer: answer)
        if is_agreed:
            console.confirm("Go?", yes=False)
        else:
            with pytest.raises(Interrupted, match="Not confirmed; nothing was done"):
                console.confirm("Go?", yes=False)
