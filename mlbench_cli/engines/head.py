"""The head of a run that this client reaches through a channel: its state, logs and results.

All that is known of a run is in one folder, RUN, that its head serves (Slurm: the shared folder; hosts: on the first
one; Kubernetes: in a pod of the run, see agent/head.py), and in the run's own folder here: any client that reaches it
may continue. Logs are copied by offset, so two clients write the same bytes. The head of a local run is the run's own
folder: local/engine.py.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from mlbench_cli.agent.channel import Channel, Document
from mlbench_cli.engines import fetch
from mlbench_cli.engines.base import Fetched
from mlbench_cli.engines.follow import POLL_SECONDS
from mlbench_cli.engines.observe import NodeReport, Snapshot, check_results, check_state
from mlbench_cli.engines.placement import NodeShare
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Finding, Run
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import size_of, write_at, write_atomically
from mlbench_cli.util.json_text import format_document

QUIET_SECONDS = 12.0  # of a head that is asked what is new, which takes it some milliseconds; the user is told then
EXTRA_LOG_BYTES = 1 << 16  # of the end of each


class RemoteHead:
    """The folder `place` of a run, behind a channel. `shares` has the ranks of each node.

    `save_manifests` writes what was submitted, for the archive. `extra_logs` are logs of the cluster's own there.
    """

    poll_seconds = POLL_SECONDS

    def __init__(
        self,
        run: Run,
        channel: Channel,
        place: str,
        shares: Sequence[NodeShare],
        save_manifests: Callable[[], None],
        extra_logs: Sequence[str] = (),
    ) -> None:
        self.run, self.channel, self.place = run, channel, place
        self._shares = shares
        self._save_manifests = save_manifests
        self._extra_logs = extra_logs
        self._lock = threading.RLock()
        self._last: tuple[float, Snapshot] | None = None

    # --- read -----------------------------------------------------------------------------------------------------

    def read(self, *, max_age: float = 0.0) -> Snapshot:
        """Ask the head once for all nodes, and copy new log lines. Raises UnreachableError if it does not answer."""
        with self._lock:
            if self._last is not None and time.monotonic() - self._last[0] < max_age:
                return self._last[1]
            RunFolder(self.run.folder).log(0).parent.mkdir(parents=True, exist_ok=True)
            snapshot = self._ask()
            self._last = time.monotonic(), snapshot
            return snapshot

    def _ask(self) -> Snapshot:
        answer = self._copy_logs()
        return Snapshot(
            time.time(),
            {node: self._report(**answer["nodes"].get(str(node), {})) for node in range(len(self._shares))},
            bool(answer["exists"]),
            bool(answer.get("cancel")),
            bool(answer.get("served", True)),
            answer.get("free_bytes"),
            self.run.spec.absent_seconds is None,
        )

    def _report(
        self, state: object = None, results: object = None, alive: bool | None = None, beat_age: float | None = None
    ) -> NodeReport:
        name = self.run.name
        return NodeReport(
            None if state is None else check_state(name, state),
            None if results is None else check_results(name, results),
            alive,
            beat_age,
        )

    def _copy_logs(self) -> Document:
        """Copy all log lines that the head has. Returns the head's last answer."""
        folder, channel = RunFolder(self.run.folder), self.channel
        while True:
            offsets = {
                str(node): {str(rank): size_of(folder.log(rank)) for rank in share.ranks(self.run.spec)}
                for node, share in enumerate(self._shares)
            }
            answer, data = channel.exchange(
                "sync",
                folder=self.place,
                run=self.run.id,
                nodes=offsets,
                limit=channel.piece,
                quiet_seconds=QUIET_SECONDS,
            )
            position = 0
            for rank, offset, size in answer["pieces"]:
                write_at(folder.log(rank), offset, data[position : position + size])  # as every other client does
                position += size
            if position < answer.get("limit", 1):
                return answer

    def wait(self, seconds: float) -> None:
        """Wait before the head is asked again."""
        time.sleep(seconds)

    def has(self, name: str) -> bool:
        """Whether the folder has a file of that name."""
        return self.channel.call("get", path=f"{self.place}/{name}", size=0)["size"] is not None

    def put(self, name: str, data: bytes = b"") -> None:
        """Write a file into the folder."""
        self.channel.call("put", data, path=f"{self.place}/{name}")

    def print_stacks(self) -> None:
        """Write a request that the nodes find in the run's folder, or that its head passes on to them."""
        self.put("stacks", os.urandom(8).hex().encode())

    # --- end ------------------------------------------------------------------------------------------------------

    def fetch(self) -> Fetched:
        """Fetch output, samples and logs into the run's folder; then release the head."""
        fetched = self._fetch_all()
        self._release()
        return fetched

    def _release(self) -> None:
        """Say that the results were fetched, so that the head need not keep them; not in another run's folder that has
        taken the name of this one."""
        if self.read().exists:
            self.put("fetched")

    def _fetch_all(self) -> Fetched:
        """Output, samples and logs, each checked against the digest of its machine."""
        run = self.run
        self._save_manifests()
        snapshot = self.read()
        for report in snapshot.nodes.values():
            for entry in (report.state or {}).get("ranks", ()):
                RunFolder(run.folder).log(entry["rank"]).touch()  # of a rank that has printed nothing, too
        found = [self.fetch_node(node, report) for node, report in snapshot.nodes.items()]
        fetch.merge_resources(run, len(snapshot.nodes))
        findings = [*self._check_logs(snapshot), *_explain_losses(snapshot)]
        self._save_placement(snapshot)
        for name in self._extra_logs:
            with suppress(MlbenchError, OSError):
                if data := self.read_end(name):
                    write_atomically(run.manifests / name, data)
        complete = all(part.complete for part in found)
        return Fetched(sum(part.files for part in found), sum(part.bytes for part in found), complete, tuple(findings))

    def fetch_node(self, node: int, report: NodeReport) -> Fetched:
        """The output of one machine, unpacked into the run's folder."""
        found = fetch.fetch_archive(self.channel, f"{self.place}/nodes/{node}", report, node, self.run)
        if found is None:
            return Fetched(0, 0, complete=report.state is None)
        return Fetched(*found)

    def read_end(self, name: str) -> bytes:
        """The last bytes of a file in the folder; none if it is not there."""
        path = f"{self.place}/{name}"
        size = self.channel.call("get", path=path, size=0)["size"] or 0
        start = max(0, size - EXTRA_LOG_BYTES)
        return self.channel.exchange("get", path=path, offset=start, size=EXTRA_LOG_BYTES)[1] if size else b""

    def _check_logs(self, snapshot: Snapshot) -> list[Finding]:
        run = self.run
        wrong, findings = fetch.check_logs(run, snapshot.nodes.values())
        for rank in wrong:
            RunFolder(run.folder).log(rank).unlink(missing_ok=True)
        if wrong:
            again, _ = fetch.check_logs(run, self.read().nodes.values())
            if again:
                raise fetch.FetchError(
                    f"The logs of ranks {again} of {run.name} differ from the digests of their machines.",
                    hint=f"mlbench wait {run.name}   tries again",
                )
        return findings

    def _save_placement(self, snapshot: Snapshot) -> None:
        """placement.json: machine, interface, CPUs and GPUs of each node, and those of each rank."""
        keys = ("node_name", "host", "address", "interface", "master_address", "cpus", "gpus", "bound", "slurm")
        nodes = [
            {"node": number, "ranks": [entry["rank"] for entry in report.state["ranks"]]}
            | {key: report.state.get(key) for key in keys}
            for number, report in sorted(snapshot.nodes.items())
            if report.state is not None
        ]
        write_atomically(self.run.manifests / "placement.json", format_document({"nodes": nodes}))


def _explain_losses(snapshot: Snapshot) -> list[Finding]:
    """Findings about machines that were lost before they handed over their results."""
    lost = [report for report in snapshot.nodes.values() if report.is_lost and report.results is None]
    if not lost:
        return []
    names = ", ".join(str((report.state or {}).get("node_name") or "a machine") for report in lost[:20])
    summary = f"{names} went away before its output had arrived: output and ends of logs are missing."
    return [Finding("results_lost", summary, hint="Run it again.")]
