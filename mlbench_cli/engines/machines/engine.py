"""Shared code of the Slurm and hosts engines: following, logs, results, and runs of other clients.

All that is known of a run is in one folder, RUN, on the machine of its head (Slurm: the shared folder; hosts: the first
one, see agent/head.py) and in the run's own folder here: any client that reaches that machine may continue. Logs are
copied by offset, so two clients write the same bytes.
"""

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from mlbench_cli.agent.channel import Channel, ChannelRequest, Document, RemoteError
from mlbench_cli.engines.base import (
    Cursor,
    Fetched,
    FoundRun,
    LogLine,
    Submission,
    UnreadableRun,
    refuse_running,
    refuse_unfetched,
)
from mlbench_cli.engines.fetch import FetchError
from mlbench_cli.engines.follow import follow_log
from mlbench_cli.engines.local.diagnosis import read_last_lines
from mlbench_cli.engines.machines import results
from mlbench_cli.engines.machines.details import MachineDetails
from mlbench_cli.engines.machines.observe import NodeReport, Snapshot, observe
from mlbench_cli.engines.machines.placement import NodeShare
from mlbench_cli.engines.machines.plan import pack_code
from mlbench_cli.errors import MlbenchError, UnreachableError, UsageError
from mlbench_cli.model.run import Ending, Finding, Observation, Run
from mlbench_cli.model.silence import Silence
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import remove_folder, size_of, write_atomically

POLL_SECONDS = 0.5
CANCEL_SECONDS = 8.0  # time for agents to see a cancellation and stop their ranks
BLOCK = 1 << 20
MAX_PARALLEL = 32
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Orphan:
    """Orphaned processes of a run on one machine."""

    host: str
    run: str
    processes: tuple[int, ...]


class MachinesEngine(ABC):
    """Executes runs on machines that `details` describe."""

    dies_with_client = False

    def __init__(self, details: MachineDetails) -> None:
        self._base_details = details
        self._lock = threading.RLock()
        self._synced: dict[str, tuple[float, Snapshot]] = {}

    # --- what differs ---------------------------------------------------------------------------------------------

    @abstractmethod
    def render(self, spec: RunSpec) -> Submission: ...

    @abstractmethod
    def submit(self, run: Run, submission: Submission, *, detach: bool = False) -> None: ...

    @abstractmethod
    def _shares(self, spec: RunSpec) -> Sequence[NodeShare]:
        """Workers and servers of each node of the run."""

    @abstractmethod
    def _head(self, run: Run) -> Channel:
        """The channel to the machine that has the run's folder."""

    @abstractmethod
    def _channels(self, run: Run | None = None) -> Sequence[Channel]:
        """A channel to each machine that may have a folder of the run, or of any run; the first is its head's."""

    @abstractmethod
    def _judge(self, run: Run, snapshot: Snapshot, observation: Observation) -> Observation:
        """The observation with facts that only this engine knows."""

    @abstractmethod
    def _stop(self, run: Run) -> None:
        """Kill what a cancellation has not ended."""

    # --- look -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def resume(self, run: Run) -> None:
        """Resume a submission whose client died."""

    def look(self, run: Run) -> Observation:
        """Copy what is new, and translate it; a run that has ended is read from its folder only."""
        if (observation := RunFolder(run.folder).read_observation()) is not None:
            return observation
        return self._observe(run, self._sync(run))

    def watch(self, run: Run) -> Generator[Observation, None, None]:
        """Yield an observation after each poll to the end. Raises UnreachableError after the limit of silence."""
        silence = Silence(RemoteError)
        last = None
        while True:
            if (kept := RunFolder(run.folder).read_observation()) is not None:
                yield kept
                return
            begun = time.monotonic()
            try:
                observation = self._observe(run, self._sync(run))
                silence.end()
            except (UnreachableError, RemoteError) as error:
                silence.bear(error, begun)
                observation = silence.observe(last or observe(run.spec, (), Snapshot(time.time(), {}), lambda rank: []))
            last = observation
            yield observation
            if observation.ended:
                return
            time.sleep(max(0.05, POLL_SECONDS - (time.monotonic() - begun)))

    def _observe(self, run: Run, snapshot: Snapshot) -> Observation:
        names = _process_names(run.spec, self._shares(run.spec))
        observation = observe(run.spec, names, snapshot, lambda rank: read_last_lines(RunFolder(run.folder).log(rank)))
        return self._judge(run, snapshot, observation)

    def _sync(self, run: Run, *, max_age: float = 0.0) -> Snapshot:
        """Ask the head once for all nodes, and copy new log lines. Raises UnreachableError if it does not answer."""
        with self._lock:
            known = self._synced.get(run.id)
            if known is not None and time.monotonic() - known[0] < max_age:
                return known[1]
            RunFolder(run.folder).log(0).parent.mkdir(parents=True, exist_ok=True)
            answer = self._copy_logs(run)
            reports = {node: NodeReport(**answer["nodes"].get(str(node), {})) for node in self._nodes(run)}
            snapshot = Snapshot(
                time.time(),
                reports,
                bool(answer["exists"]),
                bool(answer.get("cancel")),
                bool(answer.get("served", True)),
                answer.get("free_bytes"),
            )
            self._synced[run.id] = time.monotonic(), snapshot
            return snapshot

    def _nodes(self, run: Run) -> range:
        return range(len(self._shares(run.spec)))

    def _copy_logs(self, run: Run) -> Document:
        """The head's answer, after all that it had of the logs has been copied."""
        folder, shares, channel = RunFolder(run.folder), self._shares(run.spec), self._head(run)
        while True:
            offsets = {
                str(node): {str(rank): size_of(folder.log(rank)) for rank in share.ranks(run.spec)}
                for node, share in enumerate(shares)
            }
            answer, data = channel.exchange("sync", folder=self._run_place(run), nodes=offsets)
            position = 0
            for rank, offset, size in answer["pieces"]:
                # By offset, so that two clients write the same.
                with open(os.open(folder.log(rank), os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
                    os.pwrite(file.fileno(), data[position : position + size], offset)
                position += size
            if position < answer.get("limit", 1):
                return answer

    # --- logs -----------------------------------------------------------------------------------------------------

    def logs(self, run: Run, rank: int, since: Cursor | None = None, follow: bool = False) -> Iterator[LogLine]:
        """As the protocol says."""
        wait = (lambda: time.sleep(POLL_SECONDS)) if follow else None
        return follow_log(run, rank, since, lambda: self._rank_ended(run, rank), wait)

    def _rank_ended(self, run: Run, rank: int) -> bool:
        if RunFolder(run.folder).read_observation() is not None:
            return True
        try:
            snapshot = self._sync(run, max_age=POLL_SECONDS * 0.9)
        except (UnreachableError, RemoteError):
            return False
        for report in snapshot.nodes.values():
            for entry in (report.state or {}).get("ranks", ()):
                if entry["rank"] == rank:
                    return report.is_over
        return self._observe(run, snapshot).ended is not None

    def log_gaps(self, run: Run) -> tuple[Finding, ...]:
        """Empty before the results are fetched; afterward, digests reveal gaps."""
        return ()

    # --- end ------------------------------------------------------------------------------------------------------

    def fetch(self, run: Run) -> Fetched:
        """Output, samples and logs into the run's folder, each checked against the digest of its machine."""
        self._save_manifests(run)
        snapshot = self._sync(run)
        found = [self._fetch_node(run, node, report) for node, report in snapshot.nodes.items()]
        results.merge_resources(run, len(snapshot.nodes))
        findings = [*self._check_logs(run, snapshot), *_explain_losses(snapshot)]
        self._save_placement(run, snapshot)
        self._head(run).call("put", path=f"{self._run_place(run)}/fetched")
        complete = all(part.complete for part in found)
        return Fetched(sum(part.files for part in found), sum(part.bytes for part in found), complete, tuple(findings))

    def _fetch_node(self, run: Run, node: int, report: NodeReport) -> Fetched:
        """The output of one machine, unpacked into the run's folder."""
        found = results.fetch_archive(self._head(run), f"{self._run_place(run)}/nodes/{node}", report, node, run)
        if found is None:
            return Fetched(0, 0, complete=report.state is None)
        return Fetched(*found)

    def _check_logs(self, run: Run, snapshot: Snapshot) -> list[Finding]:
        wrong, findings = results.check_logs(run, snapshot.nodes.values())
        for rank in wrong:
            RunFolder(run.folder).log(rank).unlink(missing_ok=True)
        if wrong:
            snapshot = self._sync(run)
            again, _ = results.check_logs(run, snapshot.nodes.values())
            if again:
                raise FetchError(
                    f"The logs of ranks {again} of {run.name} differ from the digests of their machines.",
                    hint=f"mlbench wait {run.name}   tries again",
                )
        return findings

    def _save_manifests(self, run: Run) -> None:
        folder = run.folder / "manifests"
        folder.mkdir(parents=True, exist_ok=True)
        for document in self.render(run.spec).documents:
            if "script" in document:
                write_atomically(folder / "job.sh", str(document["script"]).encode())
            else:
                write_atomically(folder / "plan.json", (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())

    def _save_placement(self, run: Run, snapshot: Snapshot) -> None:
        """manifests/placement.json: machine, interface, CPUs and GPUs of each node, and those of each rank."""
        keys = ("node_name", "host", "address", "interface", "master_address", "cpus", "gpus", "bound", "slurm")
        nodes = [
            {"node": number, "ranks": [entry["rank"] for entry in report.state["ranks"]]}
            | {key: report.state.get(key) for key in keys}
            for number, report in sorted(snapshot.nodes.items())
            if report.state is not None
        ]
        document = {"schema_version": 1, "nodes": nodes}
        write_atomically(run.folder / "manifests" / "placement.json", (json.dumps(document, indent=1) + "\n").encode())

    def kept_until(self, run: Run) -> float | None:
        """None: results stay on the machines until the run is deleted."""
        return None

    def cancel(self, run: Run) -> None:
        """Let the agents stop their ranks and pack results; then kill leftovers."""
        if RunFolder(run.folder).read_observation() is not None:
            return
        self._head(run).call("put", path=f"{self._run_place(run)}/cancel")
        self._stop(run)

    def _await_end(self, run: Run, seconds: float = CANCEL_SECONDS) -> Snapshot:
        end = time.monotonic() + seconds
        while True:
            snapshot = self._sync(run)
            if not snapshot.shows_life or snapshot.is_over or time.monotonic() >= end:
                return snapshot
            time.sleep(0.2)

    def delete(self, run: Run, *, force: bool = False) -> None:
        """Remove the run's folders on its machines and here; rejects a running run, unless `force`."""
        if not force:
            self._refuse_loss(run)
        elif RunFolder(run.folder).read_observation() is None:
            self.cancel(run)
            self._await_end(run)
        for answer in run_in_parallel(lambda channel: self._remove(channel, run, force), self._channels(run)):
            if isinstance(answer, MlbenchError) and not force:
                raise answer
        remove_folder(run.folder)

    def _remove(self, channel: Channel, run: Run, force: bool) -> Document:
        if force:
            channel.call("end_processes", folder=self._run_place(run))
        return channel.call("remove", folder=self._run_place(run), force=force)

    def _refuse_loss(self, run: Run) -> None:
        if (run.folder / "SHA256SUMS").exists() or not self._sync(run).exists:
            return  # including leftovers of a delete that was killed
        observation = self.look(run)
        if observation.ended is None:
            raise refuse_running(run)
        if observation.ended is not Ending.NEVER_STARTED:
            raise refuse_unfetched(run)

    # --- runs of others -------------------------------------------------------------------------------------------

    def discover(self, namespace: str | None = None) -> list[FoundRun | UnreadableRun]:
        """All runs of the machines' folders, oldest first, whoever started them."""
        found: dict[str, FoundRun | UnreadableRun] = {}
        for document in self._list_runs():
            for entry in document["runs"]:
                try:
                    run = entry["run"]
                    spec = RunSpec.from_dict(run["spec"])
                    known = FoundRun(str(run["id"]), str(run["created"]), spec, bool(entry["fetched"]))
                    if known.id not in found or known.is_fetched:  # only its head knows
                        found[known.id] = known
                except (TypeError, KeyError, MlbenchError) as error:
                    found.setdefault(entry["name"], UnreadableRun(entry["name"], str(error)))
        return sorted(found.values(), key=lambda item: item.created if isinstance(item, FoundRun) else "")

    def list_orphans(self) -> list[Orphan]:
        """Processes of runs without an agent."""
        return [
            Orphan(document["host"], entry["name"], tuple(entry["processes"]))
            for document in self._list_runs()
            for entry in document["runs"]
            if entry["processes"] and not entry["supervised"]
        ]

    def end_orphans(self) -> None:
        """Kill processes of runs whose agents are gone, on all machines of the cluster."""
        for channel in self._channels():
            for entry in channel.call("list_runs", base=self._runs_folder)["runs"]:
                if entry["processes"] and not entry["supervised"]:
                    channel.call("end_processes", folder=f"{self._runs_folder}/{entry['name']}")

    def _list_runs(self) -> list[Document]:
        channels = self._channels()
        answers = ask_all(lambda channel: channel.call("list_runs", base=self._runs_folder), channels)
        return [
            {**answer, "host": channel.target.name}
            for channel, answer in zip(channels, answers, strict=True)
            if not isinstance(answer, MlbenchError)
        ]

    # --- plumbing -------------------------------------------------------------------------------------------------

    @property
    def _runs_folder(self) -> str:
        return f"{self._base_details.folder}/runs"

    @property
    def _code_folder(self) -> str:
        return f"{self._base_details.folder}/code/{pack_code()[1]}"

    def _run_place(self, run: Run) -> str:
        return f"{self._runs_folder}/{run.name}"

    def _install_code(self, channel: Channel) -> None:
        """Copy the code once: what has its digest already is left as it is."""
        data, sha256 = pack_code()
        folder = f"{self._base_details.folder}/code"
        if channel.call("install", folder=folder, sha256=sha256)["folder"] is None:
            channel.call("install", data, folder=folder, sha256=sha256)

    def _claim_request(self, run: Run) -> ChannelRequest:
        """Writes the run's record into its folder, unless one is there: the answer's `written` says which."""
        document = {"id": run.id, "created": run.created, "spec": run.spec.to_dict(), "spec_hash": run.spec.hash}
        data = (json.dumps(document, sort_keys=True) + "\n").encode()
        return ChannelRequest("put", {"path": f"{self._run_place(run)}/run.json", "new": True}, data)

    def _check_owner(self, channel: Channel, run: Run) -> None:
        """Raises UsageError if the run's folder is that of another run."""
        _, known = channel.exchange("get", path=f"{self._run_place(run)}/run.json")
        if json.loads(known)["id"] != run.id:
            raise UsageError(
                f'{channel.target.name} has another run "{run.name}" in {self._run_place(run)}.',
                hint=f"mlbench status --refresh, then mlbench delete {run.name}; or choose another name",
            )


def run_in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result | MlbenchError]:
    """The result of each, or its error, in the order of items."""

    def attempt(item: Item) -> Result | MlbenchError:
        try:
            return work(item)
        except MlbenchError as error:
            return error

    if len(items) == 1:
        return [attempt(items[0])]
    with ThreadPoolExecutor(min(MAX_PARALLEL, max(1, len(items)))) as pool:
        return list(pool.map(attempt, items))


def ask_all(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result | MlbenchError]:
    """The same. Raises the first error if none has a result."""
    answers = run_in_parallel(work, items)
    if answers and all(isinstance(answer, MlbenchError) for answer in answers):
        raise next(answer for answer in answers if isinstance(answer, MlbenchError))
    return answers


def do_all(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The same. Raises the first error if there is one."""
    answers = run_in_parallel(work, items)
    if (error := next((answer for answer in answers if isinstance(answer, MlbenchError)), None)) is not None:
        raise error
    return [answer for answer in answers if not isinstance(answer, MlbenchError)]


def _explain_losses(snapshot: Snapshot) -> list[Finding]:
    """What is missing of machines that were lost before they had handed over."""
    lost = [report for report in snapshot.nodes.values() if report.is_lost and report.results is None]
    if not lost:
        return []
    names = ", ".join(str((report.state or {}).get("node_name") or "a machine") for report in lost[:20])
    summary = f"{names} went away before its output had arrived: output and ends of logs are missing."
    return [Finding("results_lost", summary, hint="mlbench gc hosts   ends leftover processes there.")]


def _process_names(spec: RunSpec, shares: Sequence[NodeShare]) -> list[str | None]:
    """Name of the node of each process, ranks first, as far as it is known before the run."""
    names = {rank: share.name for share in shares for rank in share.ranks(spec)}
    return [names[rank] for rank in range(spec.process_count)]
