"""Shared code of the engines whose runs have a head: following, logs and results. They differ in where the head's
folder is.

All that is known of a run is in one folder, RUN, that its head serves (Slurm: the shared folder; hosts: on the first
one; Kubernetes: in a pod of the run, see agent/head.py), and in the run's own folder here: any client that reaches it
may continue. Logs are copied by offset, so two clients write the same bytes.
"""

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence

from mlbench_cli.agent.channel import Channel, Document, RemoteError
from mlbench_cli.engines import fetch
from mlbench_cli.engines.base import Cursor, Fetched, LogLine, Submission
from mlbench_cli.engines.follow import follow_log
from mlbench_cli.engines.observe import NodeReport, Snapshot, observe
from mlbench_cli.engines.placement import NodeShare
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Finding, Observation, Run
from mlbench_cli.model.silence import Silence
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import size_of, write_atomically

POLL_SECONDS = 0.5
IDLE_FACTOR = 15  # sleep 15x the CPU time of an observation, so that 1,000 busy nodes cost about 6 % of a core


class HeadEngine(ABC):
    """Executes runs whose heads this client reaches through a channel.

    `report` is called with a sentence if the head does not answer while a log is followed.
    """

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        self._report = report
        self._lock = threading.RLock()
        self._synced: dict[str, tuple[float, Snapshot]] = {}

    # --- what differs ---------------------------------------------------------------------------------------------

    @abstractmethod
    def render(self, spec: RunSpec) -> Submission: ...

    @abstractmethod
    def submit(self, run: Run, submission: Submission) -> None: ...

    @abstractmethod
    def resume(self, run: Run) -> None:
        """Resume a submission whose client died."""

    @abstractmethod
    def _shares(self, spec: RunSpec) -> Sequence[NodeShare]:
        """Workers and servers of each node of the run."""

    @abstractmethod
    def _head(self, run: Run) -> Channel:
        """The channel to where the run's folder is."""

    @abstractmethod
    def _run_place(self, run: Run) -> str:
        """The run's folder there."""

    @abstractmethod
    def _observe(self, run: Run, snapshot: Snapshot) -> Observation:
        """The observation from the nodes' states, with facts that only this engine knows."""

    @abstractmethod
    def _save_manifests(self, run: Run) -> None:
        """What was submitted, for the archive."""

    # --- look -----------------------------------------------------------------------------------------------------

    def look(self, run: Run) -> Observation:
        """Copy new log lines and translate the nodes' states; a run that has ended is read from its folder only."""
        return self._look(run)

    def _look(self, run: Run) -> Observation:
        if (observation := RunFolder(run.folder).read_observation()) is not None:
            return observation
        with self._lock:
            return self._observe(run, self._sync(run))

    def watch(self, run: Run) -> Generator[Observation, None, None]:
        """Yield an observation after each poll to the end. Raises UnreachableError after the limit of silence."""
        silence = Silence(RemoteError)
        last = None
        while True:
            if (kept := RunFolder(run.folder).read_observation()) is not None:
                yield kept
                return
            begun, used = time.monotonic(), time.thread_time()
            try:
                observation = self._look(run)
                silence.end()
            except MlbenchError as error:
                silence.tolerate(error, begun)
                observation = silence.observe(last or observe(run.spec, (), Snapshot(time.time(), {}), lambda rank: []))
            last = observation
            yield observation
            if observation.ended:
                return
            used = time.thread_time() - used
            time.sleep(max(0.05, POLL_SECONDS - (time.monotonic() - begun), IDLE_FACTOR * used))

    def _sync(self, run: Run, *, max_age: float = 0.0) -> Snapshot:
        """Ask the head once for all nodes, and copy new log lines. Raises UnreachableError if it does not answer."""
        with self._lock:
            known = self._synced.get(run.id)
            if known is not None and time.monotonic() - known[0] < max_age:
                return known[1]
            RunFolder(run.folder).log(0).parent.mkdir(parents=True, exist_ok=True)
            snapshot = self._ask(run)
            self._synced[run.id] = time.monotonic(), snapshot
            return snapshot

    def _ask(self, run: Run) -> Snapshot:
        answer = self._copy_logs(run)
        nodes = range(len(self._shares(run.spec)))
        return Snapshot(
            time.time(),
            {node: NodeReport(**answer["nodes"].get(str(node), {})) for node in nodes},
            bool(answer["exists"]),
            bool(answer.get("cancel")),
            bool(answer.get("served", True)),
            answer.get("free_bytes"),
            run.spec.absent_seconds is None,
        )

    def _copy_logs(self, run: Run) -> Document:
        """Copy all log lines that the head has. Returns the head's last answer."""
        folder, shares, channel = RunFolder(run.folder), self._shares(run.spec), self._head(run)
        while True:
            offsets = {
                str(node): {str(rank): size_of(folder.log(rank)) for rank in share.ranks(run.spec)}
                for node, share in enumerate(shares)
            }
            answer, data = channel.exchange("sync", folder=self._run_place(run), nodes=offsets, limit=channel.piece)
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
        """See `Engine.logs`."""
        wait = (lambda: time.sleep(POLL_SECONDS)) if follow else None
        silence = Silence(RemoteError)
        return follow_log(run, rank, since, lambda: self._rank_ended(run, rank, silence), wait)

    def _rank_ended(self, run: Run, rank: int, silence: Silence) -> bool:
        if RunFolder(run.folder).read_observation() is not None:
            return True
        begun = time.monotonic()
        try:
            with self._lock:
                snapshot = self._sync(run, max_age=POLL_SECONDS * 0.9)
                for report in snapshot.nodes.values():
                    for entry in (report.state or {}).get("ranks", ()):
                        if entry["rank"] == rank:
                            return report.is_over
                ended = self._observe(run, snapshot).ended is not None
        except MlbenchError as error:
            silence.tolerate(error, begun)
            silence.tell(self._report)
            return False
        silence.end()
        return ended

    def print_stacks(self, run: Run) -> None:
        """Write a request that the nodes find in the run's folder, or that its head passes on to them."""
        self._head(run).call("put", path=f"{self._run_place(run)}/stacks", data=os.urandom(8).hex().encode())

    # --- end ------------------------------------------------------------------------------------------------------

    def fetch(self, run: Run) -> Fetched:
        """Fetch output, samples and logs into the run's folder; then release the head."""
        fetched = self._fetch_all(run)
        self._release(run)
        return fetched

    def _fetch_all(self, run: Run) -> Fetched:
        """Output, samples and logs, each checked against the digest of its machine."""
        self._save_manifests(run)
        snapshot = self._sync(run)
        for report in snapshot.nodes.values():
            for entry in (report.state or {}).get("ranks", ()):
                RunFolder(run.folder).log(entry["rank"]).touch()  # of a rank that has printed nothing, too
        found = [self._fetch_node(run, node, report) for node, report in snapshot.nodes.items()]
        fetch.merge_resources(run, len(snapshot.nodes))
        findings = [*self._check_logs(run, snapshot), *_explain_losses(snapshot)]
        self._save_placement(run, snapshot)
        complete = all(part.complete for part in found)
        return Fetched(sum(part.files for part in found), sum(part.bytes for part in found), complete, tuple(findings))

    def _release(self, run: Run) -> None:
        """Record that the results were fetched, so that the head need not keep them."""
        self._head(run).call("put", path=f"{self._run_place(run)}/fetched")

    def _fetch_node(self, run: Run, node: int, report: NodeReport) -> Fetched:
        """The output of one machine, unpacked into the run's folder."""
        found = fetch.fetch_archive(self._head(run), f"{self._run_place(run)}/nodes/{node}", report, node, run)
        if found is None:
            return Fetched(0, 0, complete=report.state is None)
        return Fetched(*found)

    def _check_logs(self, run: Run, snapshot: Snapshot) -> list[Finding]:
        wrong, findings = fetch.check_logs(run, snapshot.nodes.values())
        for rank in wrong:
            RunFolder(run.folder).log(rank).unlink(missing_ok=True)
        if wrong:
            snapshot = self._sync(run)
            again, _ = fetch.check_logs(run, snapshot.nodes.values())
            if again:
                raise fetch.FetchError(
                    f"The logs of ranks {again} of {run.name} differ from the digests of their machines.",
                    hint=f"mlbench wait {run.name}   tries again",
                )
        return findings

    def _save_placement(self, run: Run, snapshot: Snapshot) -> None:
        """placement.json: machine, interface, CPUs and GPUs of each node, and those of each rank."""
        keys = ("node_name", "host", "address", "interface", "master_address", "cpus", "gpus", "bound", "slurm")
        nodes = [
            {"node": number, "ranks": [entry["rank"] for entry in report.state["ranks"]]}
            | {key: report.state.get(key) for key in keys}
            for number, report in sorted(snapshot.nodes.items())
            if report.state is not None
        ]
        document = {"schema_version": 1, "nodes": nodes}
        write_atomically(run.manifests / "placement.json", (json.dumps(document, indent=1) + "\n").encode())


def _explain_losses(snapshot: Snapshot) -> list[Finding]:
    """Findings about machines that were lost before they handed over their results."""
    lost = [report for report in snapshot.nodes.values() if report.is_lost and report.results is None]
    if not lost:
        return []
    names = ", ".join(str((report.state or {}).get("node_name") or "a machine") for report in lost[:20])
    summary = f"{names} went away before its output had arrived: output and ends of logs are missing."
    return [Finding("results_lost", summary, hint="Run it again.")]
