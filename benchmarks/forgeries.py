"""Edit real archives in every way that somebody who embellishes a result would, and see which edits are noticed.

    python -m benchmarks.forgeries [--archives CLOSED.zip OTHER.zip REDUCE.zip]

Every edit gets fresh checksums; after an edit of evidence the documents are derived again with mlbench's own judge, as
a forger can. An edit is noticed if the archive is refused, cannot be proved (exit code 9 of `mlbench verify`), or loses
its official line or the closed division; a step of the clock is noticed if it is a finding and leaves the line as it
was. The rest is listed with the reason why no other evidence contradicts it; an edit that passes without such a reason
is exit code 1.

Without archives three runs are made first: the light goal of digits_resnet on two ranks, its preset `tiny` on one, and
an all-reduce.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.spec import canonical_json
from mlbench_cli.results.archive.evidence import load_evidence
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.judge import judge
from mlbench_cli.results.archive.seal import write_sums
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.tasks.catalog import find_rules
from mlbench_cli.util.json_text import format_document, format_parsed, format_row
from task_images.contract import PREFIX, format_event

REFUSED, UNPROVEN, NO_LINE, NOT_CLOSED = "refused", "not proven", "no line", "not closed"
FINDING, UNNOTICED = "finding", "unnoticed"
YEAR = 365 * 86400.0
LATER = "2099-01-01T00:00:00.000Z"
RUNS = {
    "closed": ("2", "--task", "digits_resnet", "--light"),
    "other": ("1", "--task", "digits_resnet", "--preset", "tiny"),
    "reduce": ("2", "--task", "allreduce", "--preset", "tiny"),
}
Document = dict[str, Any]


class Forged:
    """The unpacked archive that an edit changes, and the folders of two other runs to take parts from."""

    def __init__(self, folder: Path, others: Mapping[str, Path]) -> None:
        self.folder = folder
        self.others = others

    def document(self, name: str, change: Callable[[Document], object]) -> None:
        """Change a JSON document and write it in its canonical form."""
        path = self.folder / name
        document = json.loads(path.read_bytes())
        change(document)
        path.write_bytes(format_parsed(document))

    def spec(self, **changes: Any) -> None:
        """Replace fields of the spec, and the hash of it."""
        self.document("run.json", lambda run: run["spec"].update(changes))
        self.document("run.json", lambda run: run.update(spec_hash=_hash(run["spec"])))

    def provenance(self, change: Callable[[Document], object]) -> None:
        self.document("run.json", lambda run: change(run["provenance"]))

    def worker(self, index: int, **changes: Any) -> None:
        self.document("observation.json", lambda seen: seen["workers"][index].update(changes))

    def log(self, rank: int) -> Path:
        return self.folder / "logs" / f"rank-{rank}.log"

    def events(self, rank: int, change: Callable[[Document], object], kind: str | None = None) -> None:
        """Change every event of a kind in the log of a rank."""
        lines = []
        for line in self.log(rank).read_text().splitlines():
            if line.startswith(PREFIX):
                event = json.loads(line.removeprefix(PREFIX))
                if kind in (None, event["event"]):
                    change(event)
                    line = format_event(event)
            lines.append(f"{line}\n")
        self.log(rank).write_text("".join(lines))

    def result(self, **changes: Any) -> None:
        """Replace fields of the result that rank 0 reported."""
        self.events(0, lambda event: event.update(changes), "result")

    def reported(self, change: Callable[[Document], object]) -> None:
        self.events(0, change, "result")

    def append(self, rank: int, event: Document) -> None:
        with open(self.log(rank), "a") as log:
            log.write(format_event(event) + "\n")

    def rows(self, change: Callable[[Document], object], keep: Callable[[Document], bool] = lambda row: True) -> None:
        """Change the rows of resources.jsonl, and keep some of them."""
        path = self.folder / "resources.jsonl"
        rows = [dict(row) for row in map(json.loads, path.read_text().splitlines()) if keep(dict(row))]
        for row in rows:
            change(row)
        path.write_bytes(b"".join(map(format_row, rows)))

    def seal(self, is_judged: bool) -> None:
        """Write fresh documents, if asked for, and fresh checksums."""
        if is_judged:
            metrics: list[bytes] = []
            with Archive.open(self.folder) as archive:
                judgement = judge(load_evidence(archive), metrics.append)
            if judgement.network is None:
                (self.folder / "network.json").unlink(missing_ok=True)
            for name, document in judgement.documents.items():
                (self.folder / name).write_bytes(format_document(document))
            (self.folder / "official_result.txt").write_text(judgement.official_text)
            (self.folder / "metrics.jsonl").write_bytes(b"".join(metrics))
        write_sums(self.folder)


@dataclass(frozen=True)
class Edit:
    """One forgery. `is_judged`: of evidence, so that the documents are derived again. `reason`: why it may pass."""

    name: str
    apply: Callable[[Forged], object]
    is_judged: bool = True
    reason: str = ""


NO_WITNESS = "one number that nothing else in the archive repeats"


def edits() -> Iterator[Edit]:
    """The edits, by the file that they change."""
    yield from _document_edits()
    yield from _log_edits()
    yield from _observation_edits()
    yield from _spec_edits()
    yield from _resource_edits()
    yield from _combined_edits()


def _document_edits() -> Iterator[Edit]:
    changes: dict[str, Callable[[Document], object]] = {
        "run's seconds": lambda d: d.update(wall_seconds=0.5),
        "task's seconds": lambda d: d["task_seconds"].update(wall=0.5),
        "official line": lambda d: d.update(official_line="98% Top 1 Validation Accuracy reached in 0.500 seconds"),
        "division": lambda d: d["division"].update(word="open"),
        "world size": lambda d: d.update(world_size=64),
        "conditions": lambda d: d["conditions"].update(labels=["none"]),
        "a metric": lambda d: d["metrics"].update(train_loss=0.0),
        "price": lambda d: d.update(price={"per_hour": 1.0, "amount": 0.01}),
        "timings": lambda d: d["timings"]["communication"].update(rank0=0.001),
        "outcome": lambda d: d.update(outcome="completed"),
        "schema 2": lambda d: d.update(schema_version=2),
        "judge 0": lambda d: d.update(judge=0),
        "judge 2": lambda d: d.update(judge=2),
        "judge 99": lambda d: d.update(judge=99),
        "no judge": lambda d: d.pop("judge"),
    }
    for name, change in changes.items():
        yield Edit(f"result.json: {name}", _document("result.json", change), False)
    yield Edit(
        "environment.json: a GPU",
        lambda f: f.document("environment.json", lambda d: d["ranks"]["0"].update(device_name="NVIDIA H100")),
        False,
    )
    yield Edit("network.json: method", lambda f: f.document("network.json", lambda d: d.update(method="netem")), False)
    yield Edit(
        "findings.json: a finding",
        lambda f: f.document("findings.json", lambda d: d["findings"].append({"code": "x", "summary": "y"})),
        False,
    )
    yield Edit(
        "official_result.txt",
        lambda f: _replace(f.folder / "official_result.txt", "reached in", "reached in 0."),
        False,
    )
    yield Edit("metrics.jsonl: a line less", lambda f: _drop_line(f.folder / "metrics.jsonl"), False)


def _log_edits() -> Iterator[Edit]:
    def scale(name: str, factor: float) -> Callable[[Forged], object]:
        return _reported(lambda e: e.update({name: type(e[name])(e[name] * factor)}))

    def shift(seconds: float) -> Callable[[Forged], object]:
        def apply(f: Forged) -> None:
            for rank in range(2):
                f.events(rank, lambda e: e.update(time=e["time"] + seconds))

        return apply

    def is_accuracy(event: Document) -> bool:
        return "Prec@1" in event["name"]

    def raise_accuracy(event: Document) -> None:
        if is_accuracy(event):
            event["value"] = 99.9

    def move_to_rank_1(f: Forged) -> None:
        kept: list[str] = []
        moved: list[str] = []
        for line in f.log(0).read_text().splitlines():
            is_moved = line.startswith(PREFIX) and '"metric"' in line and "Prec@1" in line
            (moved if is_moved else kept).append(line)
        f.log(0).write_text("".join(f"{line}\n" for line in kept))
        f.log(1).write_text(f.log(1).read_text() + "".join(f"{line}\n" for line in moved))

    def time(f: Forged, rank: int = 0) -> float:
        return float(json.loads(f.log(rank).read_text().split(PREFIX)[-1].splitlines()[0])["time"])

    for seconds in (0.1, 1e-9, 9999.0):
        yield Edit(f"log: task took {seconds:g} s", _reported(partial(_set, name="wall_seconds", value=seconds)))
    yield Edit("log: training steps took 0.1 s", lambda f: f.result(training_seconds=0.1))
    yield Edit("log: 100 times the samples", scale("samples", 100))
    yield Edit("log: 100 times the updates", scale("updates", 100))
    yield Edit("log: twice the epochs", scale("epochs", 2))
    yield Edit(
        "log: 100 times the throughput",
        _reported(lambda e: e["details"]["throughput"].update(samples_per_second=1e6)),
    )
    yield Edit("log: communication took 0 s", _reported(lambda e: _set_timing(e, "communication", 0.0)))
    yield Edit("log: every timing is 1e6 s", _reported(_set_timings))
    yield Edit("log: least timing above the greatest", _reported(lambda e: e["timings"]["forward"].update(min=1e6)))
    yield Edit("log: precision", _reported(lambda e: e["details"].update(precision="bf16")))
    yield Edit("log: options", _reported(lambda e: e["details"]["options"].update(batch_size=4096)))
    yield Edit("log: no options", _reported(lambda e: e["details"].pop("options")))
    yield Edit("log: digest of the data", _reported(lambda e: e["data_identity"].update(digest="sha256:0")))
    yield Edit("log: count of the data", _reported(lambda e: e["data_identity"].update(counts={"images": 9})))
    yield Edit("log: accuracy of every epoch", lambda f: f.events(0, raise_accuracy, "metric"))
    yield Edit("log: goal's value", _reported(lambda e: e["goal"].update(value=99.9)))
    yield Edit("log: goal proved by rank 1", move_to_rank_1)
    yield Edit(
        "log: a better metric at the end",
        lambda f: f.append(
            0, {"v": 1, "event": "metric", "rank": 0, "time": time(f), "name": "train_loss", "value": 0.0}
        ),
        reason="a program may go on reporting, and no figure rests on it",
    )
    yield Edit("log: a year before the run", shift(-YEAR))
    yield Edit("log: a day after the run", shift(86400.0))
    yield Edit("log: rank 0 ran on a GPU", _environment(lambda e: e.update(device="cuda")))
    yield Edit(
        "log: another device's name",
        _environment(lambda e: e.update(device_name="NVIDIA H100")),
    )
    yield Edit("log: another CPU", _environment(lambda e: e.update(cpu="EPYC 9965")))
    yield Edit("log: world of 64", _environment(lambda e: e.update(world_size=64)))
    yield Edit("log: another backend", _environment(lambda e: e.update(backend="nccl")))
    yield Edit("log: other code", _environment(lambda e: e.update(code_digest="0" * 64)))
    yield Edit("log: no code digest", _environment(lambda e: e.pop("code_digest", None)))
    yield Edit("rank 1's log removed", lambda f: f.log(1).unlink())
    yield Edit("rank 1's log emptied", lambda f: f.log(1).write_text(""))
    yield Edit("rank 1's log is rank 0's", lambda f: shutil.copy(f.log(0), f.log(1)))
    yield Edit("a log of rank 7", lambda f: shutil.copy(f.log(1), f.log(7)))
    yield Edit("logs of a run of another size", lambda f: shutil.copy(f.others["other"] / "logs/rank-0.log", f.log(0)))
    yield Edit("logs of another task", lambda f: shutil.copy(f.others["reduce"] / "logs/rank-0.log", f.log(0)))


def _observation_edits() -> Iterator[Edit]:
    def of(change: Callable[[Document], object]) -> Callable[[Forged], object]:
        return lambda f: f.document("observation.json", change)

    def shorten(seen: Document) -> None:
        seen["seconds"] = 3.0
        for worker in seen["workers"]:
            worker.update(seconds=3.0, finished=worker["started"] + 3.0)

    def shift(seconds: float) -> Callable[[Document], object]:
        def change(seen: Document) -> None:
            seen["time"] += seconds
            for worker in seen["workers"]:
                worker.update(started=worker["started"] + seconds, finished=worker["finished"] + seconds)

        return change

    def step(seconds: float) -> Callable[[Document], object]:
        def change(seen: Document) -> None:
            for worker in seen["workers"]:
                worker["finished"] += seconds

        return change

    yield Edit("observation: 3 s long", of(shorten))
    yield Edit("observation: seconds alone", of(lambda d: d.update(seconds=3.0)))
    yield Edit("observation: ended before it started", lambda f: f.worker(1, finished=0.0))
    yield Edit("observation: before it was recorded", of(shift(-2 * 86400)))
    yield Edit("observation: other machines", lambda f: f.worker(1, node="other"))
    yield Edit(
        "observation: 64 workers", of(lambda d: d.update(workers=[{**d["workers"][0], "rank": r} for r in range(64)]))
    )
    yield Edit("observation: rank 0 twice", lambda f: f.worker(1, rank=0))
    why = "the exit code decides; the phase is only shown"
    yield Edit("observation: failed with exit code 0", lambda f: f.worker(1, phase="failed"), reason=why)
    yield Edit("observation: exit code 1", lambda f: f.worker(1, exit_code=1, phase="failed"))
    for seconds in (3600.0, -3600.0, 5.0, -5.0):
        yield Edit(f"observation: the clock stepped by {seconds:+g} s", of(step(seconds)))
    for seconds in (0.1, -0.1):
        why = "no more than NTP corrects; every duration is of the monotonic clock"
        yield Edit(f"observation: the clock stepped by {seconds:+g} s", of(step(seconds)), reason=why)


def _spec_edits() -> Iterator[Edit]:
    yield Edit("run.json: seed", lambda f: f.spec(seed=7))
    yield Edit("run.json: 1 worker", lambda f: f.spec(workers=1))
    yield Edit("run.json: 64 workers", lambda f: f.spec(workers=64))
    yield Edit("run.json: the full goal", lambda f: f.spec(goal="full"))
    yield Edit("run.json: on GPUs", lambda f: f.spec(gpus_per_worker=8, device="gpu"))
    yield Edit("run.json: backend", lambda f: f.spec(backend="nccl"))
    yield Edit("run.json: cluster", lambda f: f.spec(cluster="gke-1"))
    yield Edit("run.json: engine", lambda f: f.spec(engine="kubernetes"))
    yield Edit("run.json: method", lambda f: f.spec(method={"name": "wfbp"}))
    yield Edit("run.json: price", lambda f: f.spec(price={"per_hour": 0.01}), reason=NO_WITNESS)
    yield Edit("run.json: the machine was its own", lambda f: f.spec(share_machine=False))
    yield Edit("run.json: code digest", lambda f: f.provenance(lambda p: p["code"].update(digest="0" * 64)))
    yield Edit(
        "run.json: GPUs",
        lambda f: f.provenance(lambda p: p["machine"].update(gpus=["H100"])),
        reason="a run on the CPU may be on a machine with GPUs",
    )
    yield Edit("run.json: CPU", lambda f: f.provenance(lambda p: p["machine"].update(cpu="EPYC 9965")))
    yield Edit(
        "run.json: created 2099",
        lambda f: f.document("run.json", lambda d: d.update(created=LATER)),
    )
    yield Edit("run.json: name in the spec", lambda f: f.spec(name="other-2"))
    yield Edit("run.json: name", _rename, reason="a name that its owner chose, without a meaning")
    yield Edit("run.json: mlbench 3.9.9", lambda f: f.document("run.json", lambda d: d.update(mlbench="3.9.9")))
    yield Edit("run.json: no provenance", lambda f: f.document("run.json", lambda d: d.update(provenance=None)))
    yield Edit("run.json: preset without its rules", lambda f: f.spec(preset="tiny"))
    yield Edit("run.json: no rules of the task", lambda f: f.document("run.json", lambda d: d.update(task=None)))
    yield Edit("run.json: version of the spec", lambda f: f.spec(spec_version=99))
    yield Edit("run.json: schema 99", lambda f: f.document("run.json", lambda d: d.update(schema_version=99)))
    yield Edit("run.json: a goal that is nearer", lambda f: _set_parameter(f, "goal_light", 10.0))
    yield Edit("run.json: a smaller batch", lambda f: _set_parameter(f, "batch_size", 1))


def _resource_edits() -> Iterator[Edit]:
    yield Edit("resources: emptied", lambda f: (f.folder / "resources.jsonl").write_text(""))
    yield Edit("resources: no machine", lambda f: f.rows(lambda row: None, lambda row: row.get("kind") != "machine"))
    yield Edit("resources: nothing else was busy", lambda f: f.rows(_forget_load), reason=NO_WITNESS)
    yield Edit("resources: of 2099", lambda f: f.rows(lambda row: row.update(time=LATER)))
    yield Edit(
        "resources: the machine's lock was held", lambda f: f.rows(lambda r: "lock" in r and r.update(lock="held"))
    )


def _combined_edits() -> Iterator[Edit]:
    def relabel(f: Forged) -> None:
        """A small run as the benchmark's own: its preset and rules replaced, the ranks' parameters left."""
        run = json.loads((f.others["other"] / "run.json").read_bytes())
        rules = find_rules("digits_resnet", "spec")
        assert rules is not None
        for name in ("run.json", "observation.json", "resources.jsonl"):
            shutil.copy(f.others["other"] / name, f.folder / name)
        shutil.rmtree(f.folder / "logs")
        shutil.copytree(f.others["other"] / "logs", f.folder / "logs")
        f.document("run.json", lambda d: d.update(task={**d["task"], "preset": rules.to_dict()["preset"]}))
        f.spec(preset="spec", goal="light", parameters={**run["spec"]["parameters"], **rules.preset})
        f.events(0, lambda e: e["goal"].update(kind="light", threshold=rules.spec["goal_light"], value=98.5), "result")

    def two_lines(f: Forged) -> None:
        last = [line for line in f.log(0).read_text().splitlines() if '"result"' in line or "val_global_Prec@1" in line]
        f.log(0).write_text("".join(f"{line}\n" for line in last[-2:]))
        f.log(1).unlink()
        (f.folder / "resources.jsonl").write_text("")
        f.document("run.json", lambda d: d.update(provenance=None))

    def halve(f: Forged) -> None:
        """Every number that rank 0 noted of the time to the goal, all alike, as a careful forger would."""

        def change(event: Document) -> None:
            for name in ("wall_seconds", "training_seconds"):
                event[name] /= 2
                for goal in event["details"]["goals"].values():
                    goal[name] /= 2
            for spread in event["timings"].values():
                spread.update({key: value / 2 for key, value in spread.items()})

        f.reported(change)

    yield Edit("a small run relabeled as the benchmark's", relabel)
    yield Edit("two lines of log, nothing else", two_lines)
    why = "a clock may stop at the goal while the training and its metrics go on"
    yield Edit("half the time in every field of the result", halve, reason=why)


def _reported(change: Callable[[Document], object]) -> Callable[[Forged], object]:
    """An edit of the result that rank 0 reported."""
    return lambda f: f.reported(change)


def _environment(change: Callable[[Document], object]) -> Callable[[Forged], object]:
    """An edit of what rank 0 reported of itself."""
    return lambda f: f.events(0, change, "environment")


def _document(name: str, change: Callable[[Document], object]) -> Callable[[Forged], object]:
    """An edit of a JSON document."""
    return lambda f: f.document(name, change)


def _set(document: Document, name: str, value: Any) -> None:
    document[name] = value


def _set_timings(event: Document) -> None:
    for name in event["timings"]:
        _set_timing(event, name, 1e6)


def _set_timing(event: Document, name: str, value: float) -> None:
    event["timings"][name] = dict.fromkeys(("min", "mean", "max", "rank0"), value)


def _set_parameter(forged: Forged, name: str, value: float) -> None:
    run = json.loads((forged.folder / "run.json").read_bytes())
    forged.spec(parameters={**run["spec"]["parameters"], name: value})


def _rename(forged: Forged) -> None:
    forged.spec(name="better-2")
    forged.document("run.json", lambda run: run.update(name="better-2"))


def _forget_load(row: Document) -> None:
    if row.get("kind") == "machine":
        row.update(busy_seconds=row["own_seconds"])


def _replace(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text, path
    path.write_text(text.replace(before, after))


def _drop_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def _hash(spec: Document) -> str:
    return sha256(canonical_json(spec)).hexdigest()[:16]


def try_edit(edit: Edit, line: str, base: Path, others: Mapping[str, Path], folder: Path) -> tuple[str, str]:
    """What becomes of an edit, and the words of the first check that noticed it."""
    shutil.copytree(base, folder)
    forged = Forged(folder, others)
    try:
        edit.apply(forged)
        forged.seal(edit.is_judged)
        found = verify(folder)
    except MlbenchError as error:
        return REFUSED, error.message
    if found.problems:
        return REFUSED, str(found.problems[0])
    if found.not_derived:
        return UNPROVEN, found.not_derived[0]
    result = json.loads((folder / "result.json").read_bytes())
    if result["official_line"] is None:
        return NO_LINE, ", ".join(result.get("doubts", [])) or result["outcome"]
    if result["division"]["word"] != "closed":
        return NOT_CLOSED, str(result["division"]["reason"])
    findings = json.loads((folder / "findings.json").read_bytes())["findings"]
    if findings and result["official_line"] == line:
        return FINDING, f"{findings[0]['summary']} The official line, by the monotonic clock, is unchanged."
    return UNNOTICED, edit.reason


def make_archives(folder: Path) -> list[Path]:
    """The archives of three runs that are made for this; raises SystemExit if one does not end well."""
    home = {**os.environ, "MLBENCH_HOME": str(folder / "home")}
    paths = []
    for name, (workers, *words) in RUNS.items():
        command = [sys.executable, "-m", "mlbench_cli", "run", name, workers, *words, "--share-machine", "--yes"]
        print(f"running {' '.join(command[3:])}", file=sys.stderr)
        subprocess.run(command, env=home, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        paths.append(folder / f"{name}.zip")
        command = [sys.executable, "-m", "mlbench_cli", "download", f"{name}-{workers}", "--output", str(paths[-1])]
        subprocess.run(command, env=home, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--archives", type=Path, nargs=3, metavar="ZIP", help="a closed result on two ranks, and two more"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folders = {}
        for kind, path in zip(RUNS, options.archives or make_archives(place), strict=True):
            folders[kind] = place / kind
            shutil.unpack_archive(path, folders[kind])
        base = folders["closed"]
        line = json.loads((base / "result.json").read_bytes())["official_line"]
        if not verify(base).ok or not line:
            print("The first archive does not verify, or has no official line.", file=sys.stderr)
            return 2
        counts: Counter[str] = Counter()
        is_explained = True
        for number, edit in enumerate(edits()):
            what, why = try_edit(edit, line, base, folders, place / f"edit-{number}")
            counts[what] += 1
            is_explained &= what != UNNOTICED or bool(why)
            print(f"{what:11} {edit.name:44} {why or 'NOTHING NOTICED IT'}"[:200])
    print(f"official line    {line}")
    print(f"edits            {counts.total()}")
    for what in (REFUSED, UNPROVEN, NO_LINE, NOT_CLOSED, FINDING, UNNOTICED):
        print(f"{what:16} {counts[what]}")
    return 0 if is_explained else 1


if __name__ == "__main__":
    sys.exit(main())
