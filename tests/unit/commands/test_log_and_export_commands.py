"""`logs`, `download`, `export` and following for `export`: which runs they read, how, and what is refused."""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli import api
from mlbench_cli.commands import _export_live, download, export, logs
from mlbench_cli.commands._export_live import SEAL_SECONDS, follow_runs
from mlbench_cli.commands.download import DownloadKind
from mlbench_cli.commands.export import Form
from mlbench_cli.commands.logs import MAX_FOLLOWED, Style, _show_run
from mlbench_cli.console import Format
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import Outcome, Run
from mlbench_cli.results.archive.log_times import LogBlock
from tests.unit.results.runs import START, event, spec

Captured = pytest.CaptureFixture[str]
CONTEXT: Any = SimpleNamespace()
EVERY = Style(None, False, False, False, None, None)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- logs -------------------------------------------------------------------------------------------------------------


class Reader:
    """The logs of ranks, each with the lines "one" and "two", a second apart."""

    def __init__(self, ranks: Sequence[int], is_whole: bool = True) -> None:
        self.ranks, self.is_whole = list(ranks), is_whole
        self.told: list[Any] = []

    def read_lines(self, rank: int, follow: bool) -> Iterator[bytes]:
        self.told.append(("lines", rank, follow))
        yield from (b"one\n", b"two\n")

    def read_blocks(self) -> Iterator[LogBlock]:
        for moment, text in ((1.0, b"one\n"), (2.0, b"two\n")):
            for rank in self.ranks:
                yield LogBlock(rank, START + moment, True, [text])

    def follow(self, write: Any, flush: Any) -> None:
        self.told.append("followed")
        write(1, b"three\n")
        flush()


def run_with(reader: Reader, name: str = "a-2") -> Any:
    gaps = [{"summary": "10 lines are missing."}]
    return SimpleNamespace(name=name, folder=Path("/no"), open_log=lambda rank: reader, list_log_gaps=lambda: gaps)


def shown(capfd: pytest.CaptureFixture[str], run: Any, **style: Any) -> tuple[str, str]:
    _show_run(run, styled(**style), Format.text)
    sys.stdout.flush()
    out, err = capfd.readouterr()
    return out, err


def styled(**changes: Any) -> Style:
    return Style(**{**vars(EVERY), **changes})


@pytest.mark.parametrize(
    ("ranks", "style", "out", "told"),
    [
        ([0], {}, "one\ntwo\n", [("lines", 0, False)]),
        ([3], {"follow": True}, "one\ntwo\n", [("lines", 3, True)]),
        ([0], {"tail": 1}, "two\n", []),
        ([0], {"begin": START + 1.5}, "two\n", []),
        ([0, 1], {}, "[0] one\n[1] one\n[0] two\n[1] two\n", []),
        ([0, 1], {"tail": 1}, "[1] two\n", []),
        ([0, 1], {"follow": True}, "[0] one\n[1] one\n[0] two\n[1] two\n", []),
    ],
)
def test_lines_of_a_run(
    capfd: pytest.CaptureFixture[str], ranks: list[int], style: dict[str, Any], out: str, told: list[Any]
) -> None:
    reader = Reader(ranks)
    found = shown(capfd, run_with(reader), **style)
    assert found == (out, "Warning: 10 lines are missing.\n")
    assert reader.told == told


def test_new_lines_of_several_ranks_follow_those_that_are_there(capfd: pytest.CaptureFixture[str]) -> None:
    reader = Reader([0, 1], is_whole=False)
    out, _ = shown(capfd, run_with(reader), follow=True)
    assert out.endswith("[1] two\n[1] three\n")
    assert reader.told == ["followed"]
    assert not shown(capfd, run_with(Reader([0, 1], is_whole=False)))[0].endswith("three\n")


def test_times_are_before_the_lines(capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capfd, run_with(Reader([0])), timestamps=True)
    assert out.splitlines() == ["2025-10-09T08:53:21.000Z one", "2025-10-09T08:53:22.000Z two"]


def test_only_so_many_ranks_are_followed_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    most = Reader(range(MAX_FOLLOWED))
    shown(capfd, run_with(most), follow=True)
    more = run_with(Reader(range(MAX_FOLLOWED + 1)))
    shown(capfd, more)
    with pytest.raises(UsageError, match=f"a-2.* has {MAX_FOLLOWED + 1} ranks; at most {MAX_FOLLOWED}") as caught:
        shown(capfd, more, follow=True)
    assert caught.value.hint == "mlbench logs a-2 --follow --rank 0"


def test_lines_as_a_document() -> None:
    assert _show_run(run_with(Reader([1])), styled(tail=1), Format.json) == {
        "name": "a-2",
        "lines": [{"rank": 1, "text": "two\n", "time": "2025-10-09T08:53:22.000Z", "time_is_exact": True}],
        "gaps": [{"summary": "10 lines are missing."}],
    }


def test_logs_of_several_runs_have_their_names_and_skip_what_was_not_started(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    told: list[Any] = []
    runs = [SimpleNamespace(name=name, folder=Path(name)) for name in ("a-1", "queued-1")]
    asked: list[Any] = []

    class Client:
        def __init__(self, notice: Any) -> None:
            pass

        def select(self, names: Any, *, all_runs: bool, filter: Any) -> Any:
            asked.append((tuple(names), all_runs, filter.states, filter.tasks))
            return SimpleNamespace(runs=runs, experiments=())

    def show(run: Any, style: Style, output: Format) -> dict[str, object]:
        told.append((run.name, style))
        return {"name": run.name}

    monkeypatch.setattr(logs, "Client", Client)
    monkeypatch.setattr(logs, "_show_run", show)
    monkeypatch.setattr(logs, "read_queued", lambda folder: "queued" if folder.name == "queued-1" else None)
    logs.logs(CONTEXT, ["x"])
    assert (told, asked) == ([("a-1", EVERY)], [(("x",), False, (), ())])
    assert capsys.readouterr().err == "--- a-1 ---\n"
    logs.logs(CONTEXT, all_runs=True, states=["failed"], tasks=["mnist"], output=Format.json)
    assert asked[-1] == ((), True, ("failed",), ("mnist",))
    assert json.loads(capsys.readouterr().out)["runs"] == [{"name": "a-1"}]
    told.clear()
    logs.logs(CONTEXT, ["x"], follow=True)
    assert [name for name, _ in told] == ["a-1", "queued-1"]
    del runs[0]
    capsys.readouterr()
    logs.logs(CONTEXT, ["queued-1"], rank=1, raw=True, timestamps=True, tail=3, since="2025-10-09T08:53:20Z")
    assert told[-1] == ("queued-1", Style(1, False, True, True, 3, START))
    assert capsys.readouterr().err == ""
    logs.logs(CONTEXT, ["queued-1"], output=Format.json)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "name": "queued-1"}
    with pytest.raises(UsageError, match="-o json prints one complete document") as caught:
        logs.logs(CONTEXT, ["a", "b"], follow=True, output=Format.json)
    assert caught.value.hint == "mlbench logs a b --follow"


class Stream(io.BytesIO):
    """A stream that counts how often it is flushed."""

    flushes = 0

    def flush(self) -> None:
        self.flushes += 1


@pytest.mark.parametrize(("follow", "flushes"), [(True, 2), (False, 0)])
def test_each_line_that_is_followed_is_handed_over_at_once(
    monkeypatch: pytest.MonkeyPatch, follow: bool, flushes: int
) -> None:
    stream = Stream()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=stream, isatty=lambda: False))
    _show_run(run_with(Reader([0])), styled(follow=follow), Format.text)
    assert (stream.getvalue(), stream.flushes) == (b"one\ntwo\n", flushes)


def test_logs_of_a_dashboard_are_printed_as_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def show_logs(there: Any, names: Any, output: Format, make_printer: Any, **options: Any) -> None:
        asked.append((there, names, output, options))
        make_printer(True).write(3, b"a line")
        make_printer(False).write(0, b"another\n")
        sys.stdout.flush()

    monkeypatch.setattr(logs, "connect", lambda context, url, *known: (url, known))
    monkeypatch.setattr(logs, "show_logs", show_logs)
    logs.logs(CONTEXT, ["a-1"], rank=3, tail=5, raw=True, follow=True, dashboard="http://x")
    options = {"rank": 3, "follow": True, "raw": True, "tail": 5}
    assert asked == [(("http://x", ("rank", "follow", "raw", "tail")), ["a-1"], Format.text, options)]
    assert capfd.readouterr().out == "[3] a line\nanother\n"


# --- download ---------------------------------------------------------------------------------------------------------


class Handle:
    """A run that writes a file of 2 KiB."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[Any] = []

    def complete(self) -> None:
        if self.name.startswith("open"):
            raise NotFoundError(f"{self.name} has not ended.")
        self.told.append("completed")

    def download(self, path: Path, *, anonymous: bool) -> None:
        self._write(path, "archive", anonymous)

    def download_partial(self, path: Path) -> None:
        self._write(path, "partial")

    def download_v3(self, path: Path) -> None:
        self._write(path, "v3")

    def _write(self, path: Path, *about: Any) -> None:
        self.told.append(about)
        path.write_bytes(b"x" * 2048)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """The runs that `download` finds."""
    found = [Handle("a-1")]
    client = SimpleNamespace(select=lambda names, *, all_runs, filter: SimpleNamespace(runs=found))
    monkeypatch.setattr(download, "Client", lambda notice: client)
    return found


@pytest.mark.parametrize(
    ("options", "told", "is_verifiable"),
    [
        ({}, ["completed", ("archive", False)], True),
        ({"anonymous": True}, ["completed", ("archive", True)], True),
        ({"partial": True}, [("partial",)], True),
        ({"kind": DownloadKind("mlbench-v3")}, ["completed", ("v3",)], False),
    ],
)
def test_a_run_is_downloaded_in_a_form(
    runs: list[Handle], home: Path, capsys: Captured, options: dict[str, Any], told: list[Any], is_verifiable: bool
) -> None:
    download.download(CONTEXT, ["a-1"], Path("x.zip"), **options)
    assert runs[0].told == told
    printed = capsys.readouterr()
    assert printed.out == "x.zip\n"
    following = ["Next: mlbench verify x.zip, mlbench charts FOLDER x.zip"] if is_verifiable else []
    assert printed.err.splitlines() == ["2.0 KiB", *following]


def test_downloads_as_documents(runs: list[Handle], home: Path, capsys: Captured) -> None:
    one = {"run": "a-1", "file": str(home / "results.zip"), "format": "archive", "bytes": 2048}
    download.download(CONTEXT, ["a-1"], output="json")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"schema_version": 1, **one}
    assert printed.err == ""
    runs += [Handle("open-1"), Handle("b-1")]
    with pytest.raises(NotFoundError, match="open-1 has not ended"):
        download.download(CONTEXT, ["x"], Path("out"), output="json")
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["error"]["message"] == "open-1 has not ended."
    assert [(each["run"], each["file"]) for each in document["runs"]] == [
        ("a-1", str(home / "out" / "a-1.zip")),
        ("b-1", str(home / "out" / "b-1.zip")),
    ]
    assert "Warning: open-1: open-1 has not ended." in printed.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"anonymous": True, "kind": DownloadKind("mlbench-v3")}, "--anonymous does not support the format mlbench-v3"),
        ({"partial": True, "anonymous": True}, "--partial needs run names and --format archive"),
        ({"partial": True, "kind": DownloadKind("mlbench-v3")}, "--partial needs run names and --format archive"),
        ({"partial": True, "all_runs": True}, "--partial needs run names and --format archive"),
    ],
)
def test_forms_that_exclude_each_other(runs: list[Handle], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        download.download(CONTEXT, ["a-1"], **options)
    assert runs[0].told == []


# --- export -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is opened and exported: each word is an archive, "demo" two."""
    told: list[Any] = []

    class Client:
        def __init__(self, notice: Any) -> None:
            pass

        def find_archives(self, words: Sequence[str]) -> list[Path]:
            return [
                Path(f"{word}-{n}") for word in words or ["all"] for n in range(2 if word in ("demo", "all") else 1)
            ]

    def open_archives(paths: Sequence[Path], stack: ExitStack, *, unproven: bool, left_out: Any) -> list[Any]:
        told.append(([str(path) for path in paths], unproven, left_out))
        return [SimpleNamespace(run={"name": str(path)}) for path in paths]

    monkeypatch.setattr(api, "Client", Client)
    monkeypatch.setattr(export, "open_archives", open_archives)
    monkeypatch.setattr(export, "format_nccl", lambda archive: f"nccl of {archive.run['name']}")
    monkeypatch.setattr(export, "make_lines", lambda archive, submitter: [f"{archive.run['name']} {submitter}"])
    monkeypatch.setattr(export, "list_missing", lambda lines: ["seed"] if lines[0].startswith("b") else [])
    return told


def test_collectives_are_a_file_for_each_run(exported: list[Any], home: Path, capsys: Captured) -> None:
    export.export(Form.nccl, "out/nccl", ["a", "b"])
    assert exported == [(["a-0", "b-0"], False, None)]
    assert (home / "out/nccl/a-0.json").read_text() == "nccl of a-0"
    assert capsys.readouterr().out == "out/nccl/a-0.json\nout/nccl/b-0.json\n"
    export.export(Form.nccl, "out", ["demo"], unproven=True, output=Format.json)
    assert exported[-1] == (["demo-0", "demo-1"], True, [])  # a damaged one does not hide the other
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1, "form": "nccl", "target": "out", "exported": ["out/demo-0.json", "out/demo-1.json"]
    }  # fmt: skip
    export.export(Form.nccl, "out")
    assert exported[-1] == (["all-0", "all-1"], False, [])


def test_logs_of_mlperf_are_numbered_and_what_they_lack_is_told(
    exported: list[Any], home: Path, capsys: Captured
) -> None:
    export.export(Form.mllog, "out", ["a", "b"], organization="us", platform="cluster", status="cloud")
    assert sorted(path.name for path in (home / "out").iterdir()) == ["result_0.txt", "result_1.txt"]
    text = (home / "out/result_1.txt").read_text()
    assert text.startswith("b-0 Submitter(")
    assert "'us'" in text
    assert text.endswith("\n")
    printed = capsys.readouterr()
    assert printed.err == "b-0: MLPerf's compliance checker will report as missing: seed.\n"


@pytest.mark.parametrize(
    ("form", "target", "options", "words"),
    [
        (Form.mllog, "out", {"status": "best"}, '--status "best" is not one of cloud, onprem, preview, research'),
        (Form.mlflow, "sqlite:///x", {"is_online": True}, "--online works only with wandb"),
        (Form.parquet, "x.parquet", {"follows": True}, "--follow needs a tracker: tensorboard, wandb, mlflow"),
        (Form.mlflow, "x.db", {}, '"x.db" is not an MLflow URI'),
        (Form.mlflow, "ftp://x", {"follows": True}, '"ftp://x" is not an MLflow URI'),
        (Form.parquet, "x.csv", {}, '"x.csv" is not the name of a Parquet file'),
    ],
)
def test_forms_need_what_fits_them(
    exported: list[Any], form: Form, target: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        export.export(form, target, ["a"], **options)
    assert words in caught.value.message


def test_a_folder_is_no_parquet_file(exported: list[Any], home: Path) -> None:
    (home / "x.parquet").mkdir()
    with pytest.raises(UsageError, match="is not the name of a Parquet file"):
        export.export(Form.parquet, "x.parquet", ["a"])


@pytest.mark.parametrize(
    ("form", "target", "kind"),
    [
        (Form.mlflow, "sqlite:///x.db", "mlflow"),
        (Form.mlflow, "http://h:1", "mlflow"),
        (Form.mlflow, "https://h", "mlflow"),
        (Form.wandb, "w", "wandb"),
        (Form.tensorboard, "t", "board"),
    ],
)
def test_trackers_get_the_runs_to_follow(
    monkeypatch: pytest.MonkeyPatch, exported: list[Any], home: Path, form: Form, target: str, kind: str
) -> None:
    monkeypatch.setattr(export, "MlflowSink", lambda place, facts: ("mlflow", place, facts))
    monkeypatch.setattr(export, "WandbSink", lambda place, facts, *, is_online: ("wandb", place, facts, is_online))
    monkeypatch.setattr(export, "TensorBoardSink", lambda place, facts: ("board", place, facts))
    made: list[Any] = []

    def follow(names: list[str], make_sink: Any) -> list[str]:
        made.append((names, make_sink("facts")))
        return names

    monkeypatch.setattr(_export_live, "follow_runs", follow)
    export.export(form, target, ["a-1"], follows=True, is_online=form is Form.wandb)
    place = target if form is Form.mlflow else Path(target)
    assert made == [(["a-1"], (kind, place, "facts", True) if form is Form.wandb else (kind, place, "facts"))]
    assert (home / target).is_dir() == (form is not Form.mlflow)
    assert exported == []


# --- following for an export ------------------------------------------------------------------------------------------


class Sink:
    """Keeps the metrics that it gets, and how it was closed."""

    def __init__(self, facts: Any) -> None:
        self.facts = facts
        self.values: list[float] = []
        self.closed: list[Any] = []

    def add(self, points: Any, samples: Any = ()) -> None:
        self.values += [point.value for point in points]

    def close(self, summary: Any, outcome: str | None) -> None:
        self.closed.append((dict(summary), outcome))


class Live:
    """A run that ends at a look, and is sealed at a later one (None: never)."""

    def __init__(self, ended: int, sealed: int | None) -> None:
        self.run = Run("f00d", spec("live-2"), Path("/no"), "2026-01-01T00:00:00Z")
        self.name, self.ended, self.sealed, self.looks, self.asked = "live-2", ended, sealed, 0, 0
        self.workspace = SimpleNamespace(engine_of=lambda run: self)

    def look(self, run: Any) -> Any:
        self.looks += 1
        return SimpleNamespace(ended="exited" if self.looks >= self.ended else None)

    @property
    def finished(self) -> Any:
        self.asked += 1
        if self.sealed is None or self.asked < self.sealed:
            return None
        return SimpleNamespace(result={"wall_seconds": 12.0}, outcome=Outcome.COMPLETED)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets `follow_runs` follow a run, which reports 1, 2, ... ; time passes as it waits."""

    def prepare(run: Live, error: BaseException | None = None) -> list[float]:
        slept: list[float] = []
        reported = iter(range(1, 1000))

        class Reader:
            def __init__(self, engine: Any, run: Any, ranks: Any) -> None:
                assert list(ranks) == [0, 1]

            def poll(self) -> list[Any]:
                if error is not None:
                    raise error
                number = next(reported)
                first, second = (
                    json.loads(event("metric", at=at, name="loss", value=value, seconds=at).removeprefix("@mlbench "))
                    for at, value in ((2.0 * number, 10 * number + 1), (2.0 * number - 1, 10 * number))
                )
                return [first, {"event": "phase", "phase": "training"}, second]

        class Client:
            def __init__(self, notice: Any) -> None:
                pass

            def select(self, names: Any) -> Any:
                return SimpleNamespace(runs=[run])

        monkeypatch.setattr(_export_live, "Client", Client)
        monkeypatch.setattr(_export_live, "EventReader", Reader)
        clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: 1000.0 + 30.0 * len(slept))
        monkeypatch.setattr(_export_live, "time", clock)
        return slept

    return prepare


def test_metrics_are_exported_until_the_archive_has_the_outcome(live: Any, capsys: Captured) -> None:
    slept = live(Live(ended=2, sealed=3))
    sinks: list[Sink] = []

    def make(facts: Any) -> Sink:
        sinks.append(Sink(facts))
        return sinks[-1]

    assert follow_runs(["live"], make) == ["live-2"]
    (sink,) = sinks
    assert sink.values == [10, 11, 20, 21, 30, 31]  # in the order of their times
    assert sink.closed == [({"wall_seconds": 12.0}, "completed")]
    assert slept == [_export_live.POLL_SECONDS] * 2
    facts = sink.facts
    assert (facts.name, facts.id, facts.task, facts.workers) == ("live-2", "f00d", "unknown-task", 2)
    assert (facts.created, facts.outcome, dict(facts.summary)) == (1_767_225_600.0, None, {})
    assert facts.config["parameters.batch_size"] == 128
    assert capsys.readouterr().err == "Following live-2; Ctrl-C ends the export, not the runs.\n"


def test_an_archive_that_nobody_seals_is_waited_for_a_minute(live: Any) -> None:
    """Time passes by 30 s with each wait: the ranks have ended at the second look, and a minute later it is closed."""
    assert SEAL_SECONDS == 60.0
    slept = live(Live(ended=2, sealed=None))
    sink = Sink(None)
    follow_runs(["live"], lambda facts: sink)
    assert len(slept) == 3
    assert sink.closed == [({}, None)]


def test_what_is_stopped_closes_its_sinks(live: Any) -> None:
    live(Live(ended=2, sealed=None), KeyboardInterrupt())
    sink = Sink(None)
    with pytest.raises(KeyboardInterrupt):
        follow_runs(["live"], lambda facts: sink)
    assert sink.closed == [({}, None)]
    with pytest.raises(UsageError, match="--follow needs run or experiment names"):
        follow_runs([], lambda facts: sink)
