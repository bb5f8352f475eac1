"""The first hour with a cloud's account: the cheapest cluster, one run, its removal, and what that proves.

Each step is a command of mlbench as a person would type it, run as a process; its output is kept as evidence. What the
steps prove, row by row of docs/clouds-assumptions.md, is listed in first_day.toml. Once a cluster may exist, the steps
that delete it run whatever happens before them.
"""

import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_cli.errors import CapacityError, MlbenchError, UsageError
from mlbench_cli.util.times import timestamp

RELEASE = "first-day"
NAME = f"{RELEASE}-1"
TTL = "1h"
# A cluster is made in 15 to 30 minutes, and a launch failure that nobody names may take as long again.
STEP_SECONDS = 5400.0
RUNS_FILE = "first-day.yaml"
REPORT = "first-day.json"
TABLE = "confirmed.md"
NOT_NEEDED = "docker is not on PATH"


@dataclass(frozen=True)
class Proof:
    """What confirms a row of the assumptions: that a step succeeded, and what its JSON holds at a place."""

    row: str
    step: str
    part: str = ""
    at: str = ""
    like: str = ""
    nameless: bool = False  # the step's JSON must not name the cluster


@dataclass(frozen=True)
class Step:
    """One command. `ends`: it belongs to the removal, which happens whatever happens before."""

    name: str
    words: tuple[str, ...]
    ends: bool = False

    @property
    def command(self) -> str:
        """As a person types it."""
        return " ".join(("mlbench", *self.words))


@dataclass
class Done:
    """What a step did. `exit_code` None: it was not tried, for the reason in `why`."""

    step: Step
    exit_code: int | None
    seconds: float = 0.0
    out: str = ""
    err: str = ""
    why: str = ""

    @property
    def document(self) -> Any:
        """The step's JSON; None if it printed none."""
        try:
            return json.loads(self.out)
        except ValueError:
            return None


@dataclass
class FirstDay:
    """The steps for one cloud, and their evidence in `folder`."""

    cloud: str
    folder: Path
    scope: Sequence[str] = ()  # options of project and location, as the commands take them
    started: str = field(default_factory=lambda: timestamp(time.time()))
    done: list[Done] = field(default_factory=list)
    machine: Sequence[str] = ()

    def plan(self, tell: Callable[[str], None]) -> Mapping[str, Any]:
        """Check the account and plan the cheapest cluster that its quota allows. Returns the plan, creates nothing.

        Raises UsageError for a cloud without such a day or a folder that is not empty, and the error of the plan.
        """
        if self.cloud not in _load():
            raise UsageError(f'--first-day supports {", ".join(_load())}, not "{self.cloud}".')
        if self.folder.exists() and any(self.folder.iterdir()):
            raise UsageError(f"{self.folder} is not empty.", hint="Choose another folder: --to FOLDER")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run(Step("doctor", ("doctor", self.cloud, *self.scope, "-o", "json")), tell)
        self._run(Step("prices", ("prices", "update", self.cloud)), tell)
        for machine in _load()[self.cloud]["machines"]:
            self.machine = machine
            planned = self._run(Step("plan", (*self._create(), "--dry-run", "-o", "json")), tell)
            if planned.exit_code == 0:
                plan: Mapping[str, Any] = planned.document["plan"]
                return plan
            if planned.exit_code != CapacityError.exit_code:
                break
        self.write()
        raise MlbenchError(
            f"The plan of the first day failed, and nothing was created: {_last_line(planned.err)}",
            hint=f"{planned.step.command}   shows it; the output of all steps is in {self.folder}",
        )

    @property
    def has_gpu(self) -> bool:
        """Whether the worker has a GPU: only the first choice does."""
        return list(self.machine) == list(_load()[self.cloud]["machines"][0])

    def steps(self) -> list[Step]:
        """What costs money, in order."""
        return [
            Step("create", (*self._create(), "--yes", "-o", "json")),
            Step("push", ("images", "push", "allreduce", "digits_resnet", "--cluster", NAME, "-o", "json")),
            Step(
                "run",
                (
                    "run",
                    "-f",
                    str(self.folder / RUNS_FILE),
                    "--cluster",
                    NAME,
                    "--to",
                    str(self.folder / "runs"),
                    "--yes",
                ),
            ),
            Step("extend", ("extend", NAME, "15m")),
            Step("list", ("list-clusters", "--cloud", "-o", "json")),
            Step("delete", ("delete-cluster", self.cloud, NAME, *self.scope, "--force", "--yes"), ends=True),
            Step("gone", ("list-clusters", "--cloud", "-o", "json"), ends=True),
            Step("rest", ("gc", self.cloud, *self.scope, "--dry-run", "-o", "json"), ends=True),
        ]

    def write_runs_file(self) -> Path:
        """The file of runs that the step `run` starts."""
        path = self.folder / RUNS_FILE
        path.write_text(
            f"# The runs of the first day on {self.cloud}: mlbench run -f {RUNS_FILE} --cluster {NAME}\n"
            f"title: First day on {self.cloud}\n"
            "workers: [1]\n"
            f"gpu: {str(self.has_gpu).lower()}\n"
            "timeout: 20m\n"
            "runs:\n"
            '  - {name: first-day-all-reduce, task: allreduce, set: {sizes: "1KiB:16MiB:x4", samples: 10}}\n'
            "  - {name: first-day-digits, task: digits_resnet, preset: tiny}\n"
        )
        return path

    def spend(self, tell: Callable[[str], None]) -> int:
        """Take all steps that cost money. Returns the exit code of the first that failed, 0 if none did.

        A failed removal comes first: leftovers cost money.
        """
        self.write_runs_file()
        failed = 0
        has_docker = shutil.which("docker") is not None
        for step in self.steps():
            skip = ""
            if failed and not step.ends:
                skip = "an earlier step failed"
            elif step.name in ("push", "run") and not has_docker:
                skip = NOT_NEEDED
            if skip:
                self.done.append(Done(step, None, why=skip))
                continue
            done = self._run(step, tell)
            if done.exit_code and (step.ends or not failed):
                failed = done.exit_code
        self.write()
        return failed

    def judge(self) -> list[tuple[Proof, str, str]]:
        """Each row with a verdict (confirmed, refuted, not tried) and what it rests on."""
        return [(proof, *_judge(proof, self.done)) for proof in _proofs(self.cloud)]

    def left(self) -> list[str]:
        """What is left of the cluster as far as the last looks tell; also if they could not tell."""
        found = []
        for name in ("gone", "rest"):
            for done in (item for item in self.done if item.step.name == name):
                if done.exit_code != 0 or done.document is None:
                    found.append(f"unknown: {done.step.command} failed: {_last_line(done.err)}")
                elif _names_cluster(done.document):
                    found.append(f"{done.step.command} lists {NAME}")
        return found

    def write(self) -> None:
        """The report as JSON, and the confirmed rows as a table for the page of assumptions."""
        rows = self.judge()
        document = {
            "cloud": self.cloud,
            "started": self.started,
            "machine": list(self.machine),
            "steps": [
                {
                    "name": item.step.name,
                    "command": item.step.command,
                    "exit_code": item.exit_code,
                    "seconds": round(item.seconds, 3),
                    "why": item.why or None,
                }
                for item in self.done
            ],
            "assumptions": [
                {"row": proof.row, "part": proof.part or None, "verdict": verdict, "evidence": evidence}
                for proof, verdict, evidence in rows
            ],
            "left": self.left(),
        }
        (self.folder / REPORT).write_text(json.dumps(document, indent=2) + "\n")
        lines = ["| assumption | confirmed |", "| --- | --- |"]
        for proof, verdict, evidence in rows:
            if verdict != "not tried":
                part = f" ({proof.part})" if proof.part else ""
                word = f"{self.started[:10]}{part}" if verdict == "confirmed" else f"**refuted** {self.started[:10]}"
                lines.append(f"| {proof.row} | {word}: {evidence} |")
        (self.folder / TABLE).write_text("\n".join(lines) + "\n")

    def _create(self) -> tuple[str, ...]:
        return (
            "create-cluster",
            self.cloud,
            "1",
            RELEASE,
            *self.machine,
            *self.scope,
            "--registry",
            "auto",
            "--ttl",
            TTL,
        )

    def _run(self, step: Step, tell: Callable[[str], None]) -> Done:
        """Run a step as a process, and keep what it prints."""
        tell(step.command)
        began = time.monotonic()
        try:
            ended = subprocess.run(
                # -P: nothing is imported from the current folder.
                [sys.executable, "-P", "-m", "mlbench_cli", *step.words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=STEP_SECONDS,
                check=False,
            )
            done = Done(step, ended.returncode, time.monotonic() - began, ended.stdout, ended.stderr)
        except subprocess.TimeoutExpired:
            done = Done(step, 124, time.monotonic() - began, err=f"no end within {STEP_SECONDS:.0f} s")
        self.done.append(done)
        number = len(self.done)
        for suffix, text in (("out", done.out), ("err", done.err)):
            (self.folder / f"{number:02}-{step.name}.{suffix}").write_text(text)
        return done


def _judge(proof: Proof, steps: Sequence[Done]) -> tuple[str, str]:
    """The verdict on one row, and its reason. A step that failed proves nothing: it may have many reasons."""
    done = next((item for item in reversed(steps) if item.step.name == proof.step), None)
    if done is None or done.exit_code != 0:
        why = "was not reached" if done is None else done.why or f"failed ({done.exit_code})"
        return "not tried", f"the step {proof.step}: {why}"
    if proof.nameless:
        # The steps that filled what is to be gone have to have succeeded, or nothing was there.
        if not any(item.step.name == "create" and item.exit_code == 0 for item in steps):
            return "not tried", "no cluster was created"
        is_there = _names_cluster(done.document)
        return (
            "refuted" if is_there else "confirmed"
        ), f"{done.step.command}: {'listed' if is_there else 'not listed'}"
    if not proof.at:
        return "confirmed", f"{done.step.command} succeeded"
    found = look_up(done.document, proof.at.replace("NAME", NAME))
    if found is _ABSENT:
        return "not tried", f"the step {proof.step} shows nothing at {proof.at}"
    is_like = re.fullmatch(proof.like, str(found)) is not None
    return ("confirmed" if is_like else "refuted"), f"{proof.at} is {found}"


_ABSENT = object()


def look_up(document: Any, path: str) -> Any:
    """The value at a path of keys; `key=value` chooses an item of a list. `_ABSENT` if there is none."""
    for word in path.split("."):
        if isinstance(document, list):
            key, _, value = word.partition("=")
            document = next((item for item in document if str(item.get(key)) == value), _ABSENT)
        else:
            document = document.get(word, _ABSENT) if isinstance(document, dict) else _ABSENT
        if document is _ABSENT:
            return _ABSENT
    return document


def _names_cluster(document: Any) -> bool:
    clusters = document.get("clusters", []) if isinstance(document, dict) else []
    return any(item.get("name") == NAME and item.get("state") != "deleted" for item in clusters)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if not line.startswith("Next:")]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return (errors or lines or ["it printed nothing"])[-1]


def _proofs(cloud: str) -> list[Proof]:
    return [Proof(**item) for item in _load()[cloud]["proofs"]]


def _load() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
