"""`mlbench data prepare`: which files and options are taken, the run that fills a claim, and what is printed."""

import io
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli import console
from mlbench_cli.commands import data as module
from mlbench_cli.commands.data import (
    _check_claim_options,
    _check_name,
    _check_url,
    _import_file,
    _module_of,
    _run_program,
    _show,
    prepare,
    request_filling,
)
from mlbench_cli.console import Format
from mlbench_cli.errors import TaskFailedError, UsageError
from mlbench_cli.model.run import Cluster
from task_images.contract import EXIT_ENVIRONMENT, EXIT_USAGE

Captured = pytest.CaptureFixture[str]


def task(name: str = "cifar", *, files: Any = ..., command: tuple[str, ...] = ("python", "-m", "own.module")) -> Any:
    found = SimpleNamespace(wanted=[("a.tar.gz", "a.tgz"), ("b.bin",)], imports=("part-*.csv",))
    return SimpleNamespace(
        name=name,
        files=found if files is ... else files,
        command=command,
        search_path=None,
        resolve=lambda preset: {"p": preset},
    )


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "b.bin", "part-1.csv", "part-.csv"])
def test_files_that_a_task_reads(name: str) -> None:
    _check_name(name, task())
    _check_url(f"s3://bucket/folder/{name}", task())


@pytest.mark.parametrize("name", ["A.TGZ", "a.tar", "part-1.csv.gz", ""])
def test_other_files_are_refused_with_those_that_it_reads(name: str) -> None:
    with pytest.raises(UsageError, match='The task "cifar" does not read a file called') as caught:
        _check_name(name, task())
    assert caught.value.hint == "It reads: a.tar.gz, a.tgz, b.bin, part-*.csv."


def test_a_task_without_files_reads_none() -> None:
    with pytest.raises(UsageError) as caught:
        _check_name("a.tgz", task(files=None))
    assert caught.value.hint == "It reads no files."


@pytest.mark.parametrize("scheme", ["http", "https", "s3", "gs"])
def test_addresses_of_files(scheme: str) -> None:
    _check_url(f"{scheme}://host/a.tgz", task())


@pytest.mark.parametrize("url", ["ftp://host/a.tgz", "https://a.tgz", "file:///a.tgz", "://host/a.tgz"])
def test_what_is_no_address_of_a_file(url: str) -> None:
    with pytest.raises(UsageError, match="this is not the address of a file") as caught:
        _check_url(url, task())
    assert caught.value.hint == "https://HOST/FILE, s3://BUCKET/FILE or gs://BUCKET/FILE"


def test_a_file_is_linked_into_the_data_folder_once(tmp_path: Path, capsys: Captured) -> None:
    source, folder = tmp_path / "a.tgz", tmp_path / "data"
    folder.mkdir()
    source.write_text("one")
    _import_file(source, folder, task())
    assert (folder / "a.tgz").samefile(source)
    assert [path.name for path in folder.iterdir()] == ["a.tgz"]
    source.unlink()
    source.write_text("two")
    _import_file(source, folder, task())
    assert (folder / "a.tgz").read_text() == "one"
    assert capsys.readouterr().err == f"{folder / 'a.tgz'} exists and is used unchanged.\n"


def test_a_file_of_another_file_system_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    (tmp_path / "a.tgz").write_text("one")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / ".a.tgz.import").write_text("half of an earlier one")
    _import_file(tmp_path / "a.tgz", folder, task())
    assert (folder / "a.tgz").read_text() == "one"
    assert not (folder / "a.tgz").samefile(tmp_path / "a.tgz")
    assert [path.name for path in folder.iterdir()] == ["a.tgz"]


def test_a_folder_is_copied_whole(tmp_path: Path) -> None:
    source = tmp_path / "b.bin"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "x").write_text("x")
    folder = tmp_path / "data"
    folder.mkdir()
    _import_file(source, folder, task())
    assert (folder / "b.bin" / "inner" / "x").read_text() == "x"


def test_a_file_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.tgz cannot be put into .*: No such file or directory\."):
        _import_file(tmp_path / "a.tgz", tmp_path, task())
    with pytest.raises(UsageError, match="--import needs --data-dir"):
        _import_file(tmp_path / "a.tgz", None, task())


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        (None, None, None, None),
        ("c", None, None, None),
        ("c", "1Gi", "fast", None),
        ("c", "1Gi", None, "rwx"),
        ("c", "1Gi", "fast", "rwo"),
    ],
)
def test_options_of_a_claim_that_go_together(options: tuple[str | None, ...]) -> None:
    _check_claim_options(*options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, "1Gi", None, None), "--size requires --claim NAME"),
        (("c", None, "fast", None), "--storage-class requires --size"),
        (("c", None, None, "rwx"), "--access requires --size"),
        (("c", "1Gi", None, "ro"), "--access ro: choose rwx"),
    ],
)
def test_options_of_a_claim_that_need_others(options: tuple[str | None, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _check_claim_options(*options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": "lab"}, "--cluster requires --claim"),
        ({"claim": "c", "import_files": ["a.tgz"]}, "--import copies files on this machine"),
        ({"import_files": ["ftp://host/a.tgz"]}, "this is not the address of a file"),
        ({"size": "1Gi"}, "--size requires --claim"),
    ],
)
def test_options_are_checked_before_anything_is_prepared(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(module, "load_task", lambda name: task())
    with pytest.raises(UsageError, match=message):
        prepare("cifar", **{"preset": "spec", **options})


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "-m", "own.module"), "own.module"),
        (("python", "train.py"), "task_images.cifar"),
    ],
)
def test_the_package_of_a_task(command: tuple[str, ...], name: str) -> None:
    assert _module_of(task(command=command)) == name


# --- a claim ----------------------------------------------------------------------------------------------------------


def test_a_claim_is_filled_by_a_run_of_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_cli.runs.launch.task_image", lambda task, cluster: f"{cluster.name}/image")
    request = request_filling(task("big_cifar"), {"p": 1}, "claim", Cluster("lab", "gke"), urls=["s3://b/a b.tgz"])
    assert (request.name, request.workers, request.image) == ("prepare-big-cifar", (1,), "lab/image")
    assert (request.cluster, request.data_claim, request.data_dir, dict(request.set)) == (
        "lab",
        "claim",
        "/data",
        {"p": 1},
    )
    assert request.command is not None
    assert shlex.split(request.command) == [
        *("python", "-m", "task_images.harness.prepare", "big_cifar", "own.module", "s3://b/a b.tgz")
    ]
    long = request_filling(task("x" * 31 + "_" + "y" * 60), {}, "c", Cluster("lab", "gke"), "/else")
    assert long.name is not None
    assert long.name.startswith("prepare-x")
    assert not long.name.endswith("-")
    assert long.data_dir == "/else"


@pytest.mark.parametrize("provider", ["local", "slurm", "hosts"])
def test_machines_without_kubernetes_have_no_claims(provider: str) -> None:
    with pytest.raises(UsageError, match='The cluster "lab" has no persistent volume claims') as caught:
        request_filling(task(), {}, "claim", Cluster("lab", provider))
    assert caught.value.hint == "--cluster NAME; on this machine: mlbench data prepare cifar --data-dir DIR"


# --- the preparation --------------------------------------------------------------------------------------------------


class Program:
    """A preparation that prints lines, and ends with a code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0, out: str = "{}", err: str = "") -> None:
        self.command: list[str] = []
        self.environment: dict[str, str] = {}
        self.returncode = code
        self.stdout, self.stderr = io.StringIO(out), io.StringIO(err)

        def start(command: list[str], *, env: dict[str, str], **_: Any) -> "Program":
            self.command, self.environment = command, env
            return self

        monkeypatch.setattr("subprocess.Popen", start)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_preparation_gets_its_parameters_and_folder(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    program = Program(monkeypatch, out='noise\n{"task": "cifar"}\n', err="reading\nwriting\n")
    assert _run_program(task(), Path("/data"), {"p": 1}, ["s3://b/a.tgz"])["task"] == "cifar"
    assert program.command[-3:] == ["cifar", "own.module", "s3://b/a.tgz"]
    assert json.loads(program.environment["MLBENCH_PARAMETERS"]) == {"p": 1}
    assert program.environment["MLBENCH_DATA_DIR"] == "/data"
    assert "MLBENCH_PROGRESS_SECONDS" not in program.environment
    assert capsys.readouterr().err == "reading\nwriting\n"
    program = Program(monkeypatch)
    _run_program(task(), None, {}, [])
    assert program.environment["MLBENCH_DATA_DIR"] == ""


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (1, TaskFailedError, 'The preparation of "cifar" failed with exit code 1.'),
        (-9, TaskFailedError, 'The preparation of "cifar" failed with exit code -9.'),
        (EXIT_USAGE, UsageError, 'The data of "cifar" could not be prepared; the lines above say why.'),
        (EXIT_ENVIRONMENT, UsageError, 'The data of "cifar" could not be prepared; the lines above say why.'),
    ],
)
def test_a_preparation_that_fails(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception], message: str
) -> None:
    Program(monkeypatch, code, out="")
    with pytest.raises(kind) as caught:
        _run_program(task(), None, {}, [])
    assert str(caught.value) == message


class Line:
    """A line of progress that keeps what is shown."""

    def __init__(self, is_live: bool) -> None:
        self.is_live = is_live
        self.shown: list[str] = []

    def print_above(self, text: str) -> None:
        self.shown.append(f"above {text}")

    def update(self, line: Any) -> None:
        self.shown += [line(60), line(None), line(20)]


def test_progress_is_a_bar_on_a_terminal_only() -> None:
    plain, live = Line(False), Line(True)
    lines: list[Any] = [plain, live]
    for line in lines:
        _show(line, "reading: 25% of 4 GB")
        _show(line, "reading 25% of 4 GB")
    bar = f"reading: {console.draw_bar(0.25)} 25% of 4 GB"
    assert plain.shown == ["above reading: 25% of 4 GB", "above reading 25% of 4 GB"]
    assert live.shown == [bar, bar, f"{bar[:19]}…", "above reading 25% of 4 GB"]
    assert bar.count("#") == 5


# --- what is printed --------------------------------------------------------------------------------------------------


def printed(monkeypatch: pytest.MonkeyPatch, captured: Captured, identity: Any, output: Format = Format.text) -> str:
    report = {"task": "cifar", "folder": "/data", "data_identity": identity}
    monkeypatch.setattr(module, "load_task", lambda name: task())
    monkeypatch.setattr(module, "_run_program", lambda *words: report)
    prepare("cifar", preset="spec", output=output)
    return captured.readouterr().out


@pytest.mark.parametrize(
    ("official", "reason", "words"),
    [
        (True, None, "  official data"),
        (False, "another digest", "  not the official data (another digest)"),
        (None, None, "  not known to be the official data"),
    ],
)
def test_the_identity_of_data_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, official: bool | None, reason: str | None, words: str
) -> None:
    identity = {
        "counts": {"train": 1281167, "validation": 50000},
        "digest": "abc",
        "official": official,
        "reason": reason,
    }
    assert printed(monkeypatch, capsys, identity).splitlines() == [
        "cifar: ready in /data",
        "     1 281 167  train",
        "        50 000  validation",
        "  digest: abc",
        words,
    ]


def test_data_without_a_digest_or_without_data(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    identity: dict[str, Any] = {"counts": {}, "digest": None, "official": None, "reason": None}
    assert "  digest: none" in printed(monkeypatch, capsys, identity).splitlines()
    assert printed(monkeypatch, capsys, None) == (
        "cifar: has no data to prepare: it generates them, or its program reads them\n"
    )
    assert json.loads(printed(monkeypatch, capsys, identity, Format.json)) == {
        "schema_version": 1, "task": "cifar", "folder": "/data", "data_identity": identity
    }  # fmt: skip


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What `prepare` does, for a task that reads files, with the clusters "lab" and "near"."""
    told: list[Any] = []
    clusters = {"lab": Cluster("lab", "attached"), "near": Cluster("near", "kind")}

    class Client:
        def __init__(self, notice: Any) -> None:
            pass

        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None:
            told.append("closed")

        def submit(self, request: Any, *, command_line: tuple[str, ...]) -> None:
            told.append(
                ("submitted", request.name, request.cluster, request.data_claim, request.data_dir, command_line)
            )

    def run(found: Any, folder: Path | None, parameters: Any, urls: Any) -> Any:
        told.append((folder, parameters, urls))
        return {"task": found.name, "folder": str(folder), "data_identity": None}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "load_task", lambda name: task())
    monkeypatch.setattr(module, "Store", lambda notice: SimpleNamespace(cluster=clusters.__getitem__))
    monkeypatch.setattr(module, "default_cluster", lambda store: clusters["lab"])
    monkeypatch.setattr(module, "Client", Client)
    monkeypatch.setattr(module, "_run_program", run)
    monkeypatch.setattr("mlbench_cli.runs.launch.task_image", lambda task, cluster: "x/task:1")
    return told


def test_files_are_imported_and_addresses_left_to_the_program(world: list[Any], tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_text("data")
    prepare("cifar", Path("folder"), ["a.tgz", "s3://bucket/b.bin"], "tiny")
    assert (tmp_path / "folder" / "a.tgz").read_text() == "data"
    assert world == [(tmp_path / "folder", {"p": "tiny"}, ["s3://bucket/b.bin"])]
    prepare("cifar", preset="spec")
    assert world[1:] == [(None, {"p": "spec"}, [])]


def test_a_claim_is_filled_by_a_run_in_the_background(world: list[Any], capsys: Captured) -> None:
    line = ("mlbench", "data", "prepare")
    prepare("cifar", preset="spec", claim="pvc")
    assert world == [("submitted", "prepare-cifar", "lab", "pvc", "/data", line), "closed"]
    printed = capsys.readouterr()
    assert printed.out == "prepare-cifar-1: prepares the data in the claim pvc of lab\n"
    assert printed.err == "\nNext: mlbench logs prepare-cifar-1 --follow, and mlbench wait prepare-cifar-1\n"
    prepare("cifar", Path("/mnt"), preset="spec", claim="pvc", cluster="near", output=Format.json)
    assert world[2:] == [("submitted", "prepare-cifar", "near", "pvc", "/mnt", line), "closed"]
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1, "run": "prepare-cifar-1", "cluster": "near", "claim": "pvc"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("is_new", "is_shared", "words"),
    [
        (True, True, ["The claim pvc created: 200Gi, storage class fast."]),
        (
            False,
            False,
            [
                "The claim pvc exists and is used unchanged: 200Gi, storage class fast.",
                "Warning: Only one node at a time can mount it; for several nodes, use a storage class with "
                "--access rwx.",
            ],
        ),
    ],
)
def test_a_claim_is_created_with_its_size(
    world: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    is_new: bool,
    is_shared: bool,
    words: list[str],
) -> None:
    class Engine:
        def ensure_claim(self, *about: Any) -> Any:
            world.append(about)
            return SimpleNamespace(
                name="pvc", is_new=is_new, is_shared=is_shared, size="200Gi", storage_class="fast"
            )  # fmt: skip

    monkeypatch.setattr("mlbench_cli.engines.kubernetes.engine.KubernetesEngine", Engine)
    monkeypatch.setattr(module, "connect_engine", lambda cluster: Engine())
    prepare("cifar", preset="spec", claim="pvc", size="200Gi", storage_class="fast", access="rwo")
    assert world[0] == ("pvc", "200Gi", "fast", "rwo")
    assert world[1][0] == "submitted"
    assert capsys.readouterr().err.splitlines()[: len(words)] == words
    monkeypatch.setattr(module, "connect_engine", lambda cluster: "an engine of hosts")
    world.clear()
    with pytest.raises(UsageError, match='The cluster "lab" has no persistent volume claims'):
        prepare("cifar", preset="spec", claim="pvc", size="200Gi")
    assert world == []
