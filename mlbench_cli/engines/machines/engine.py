"""Shared code of the engines of Slurm clusters and hosts: code on machines, cancelling, deleting, runs of others."""

import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mlbench_cli.agent.channel import Channel, ChannelRequest, Document
from mlbench_cli.engines.base import FoundRun, Submission, UnreadableRun, refuse_running, refuse_unfetched
from mlbench_cli.engines.code import pack_code
from mlbench_cli.engines.crashes import OLDEST_TORCH
from mlbench_cli.engines.diagnosis import read_last_lines
from mlbench_cli.engines.head import RemoteHead
from mlbench_cli.engines.observe import Snapshot, explain_absence, observe
from mlbench_cli.engines.placement import NodeShare
from mlbench_cli.errors import CapacityError, DamagedRun, MlbenchError, UsageError
from mlbench_cli.model.cluster_details import MachineDetails
from mlbench_cli.model.run import Ending, Observation, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import remove_folder, write_atomically
from mlbench_cli.util.json_text import format_parsed

CANCEL_SECONDS = 8.0  # time for agents to see a cancellation and stop their ranks
MAX_PARALLEL = 32
MIN_FREE_BYTES = 2 << 30  # below which users are warned; below a twentieth of it nothing is started
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

    extra_logs: tuple[str, ...] = ()  # of the cluster's own, in the run's folder

    def __init__(self, details: MachineDetails) -> None:
        self._base_details = details
        self._heads: dict[str, RemoteHead] = {}
        self._lock = threading.RLock()

    # --- what differs ---------------------------------------------------------------------------------------------

    @abstractmethod
    def render(self, spec: RunSpec) -> Submission:
        """See `Engine.render`."""

    @abstractmethod
    def submit(self, run: Run, submission: Submission) -> None:
        """See `Engine.submit`."""

    @abstractmethod
    def resume(self, run: Run) -> None:
        """See `Engine.resume`."""

    @abstractmethod
    def _shares(self, spec: RunSpec) -> Sequence[NodeShare]:
        """Workers and servers of each node of the run."""

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

    def head(self, run: Run) -> RemoteHead:
        """The run's folder on the cluster: the shared one, or that of the first host."""
        if run.id not in self._heads:
            save = partial(self._save_manifests, run)
            channel, shares = self._channels(run)[0], self._shares(run.spec)
            self._heads[run.id] = RemoteHead(run, channel, self._run_place(run), shares, save, self.extra_logs)
        return self._heads[run.id]

    def look(self, run: Run, *, max_age: float = 0.0) -> Observation:
        """Copy new log lines and translate the nodes' states; a run that has ended is read from its folder only."""
        folder = RunFolder(run.folder)
        if (kept := folder.read_observation()) is not None:
            return kept
        snapshot = self.head(run).read(max_age=max_age)
        known = {rank: share.name for share in self._shares(run.spec) for rank in share.ranks(run.spec)}
        names = [known[rank] for rank in range(run.spec.process_count)]  # of nodes, as far as known before the run
        with self._lock:
            seen = observe(run.spec, names, snapshot, lambda rank: read_last_lines(folder.log(rank)))
            if not snapshot.exists:
                return explain_absence(run, seen, "The run has no folder on the cluster")
            return self._judge(run, snapshot, seen)

    # --- end ------------------------------------------------------------------------------------------------------

    def _save_manifests(self, run: Run) -> None:
        folder = run.manifests
        folder.mkdir(parents=True, exist_ok=True)
        for document in self.render(run.spec).documents:
            if "script" in document:
                write_atomically(folder / "job.sh", str(document["script"]).encode())
            else:
                write_atomically(folder / "plan.json", format_parsed(document))

    def cancel(self, run: Run) -> None:
        """Let the agents stop their ranks and pack results; then kill leftovers."""
        if RunFolder(run.folder).read_observation() is not None or self._is_taken(self._channels(run)[0], run):
            return
        self.head(run).put("cancel")
        self._stop(run)

    def _await_end(self, run: Run, *, may_start: bool = False) -> Snapshot:
        """What is known when the run has ended, or CANCEL_SECONDS later. `may_start`: agents may be about to start."""
        end = time.monotonic() + CANCEL_SECONDS
        while True:
            snapshot = self.head(run).read()
            is_due = snapshot.shows_life or (may_start and snapshot.exists and not snapshot.is_begun)
            if not is_due or snapshot.is_over or time.monotonic() >= end:
                return snapshot
            time.sleep(0.2)

    def delete(self, run: Run, *, force: bool = False) -> None:
        """Remove the run's folders on its machines and here; rejects a running run, unless `force`."""
        if not force:
            self._refuse_loss(run)
        elif RunFolder(run.folder).read_observation() is None:
            with suppress(DamagedRun):  # its processes are found by their folder
                self.cancel(run)
                self._await_end(run)
        for answer in run_in_parallel(lambda channel: self._remove(channel, run, force), self._channels(run)):
            if isinstance(answer, MlbenchError) and not force:
                raise answer
        remove_folder(run.folder)

    def _remove(self, channel: Channel, run: Run, force: bool) -> Document:
        if self._is_taken(channel, run):
            return {}
        if force:
            channel.call("end_processes", folder=self._run_place(run))
        return channel.call("remove", folder=self._run_place(run), force=force)

    def _refuse_loss(self, run: Run) -> None:
        if (run.folder / "SHA256SUMS").exists() or not self.head(run).read().exists:
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
        answers = run_in_parallel(lambda channel: channel.call("list_runs", base=self._runs_folder), channels)
        found: list[Document] = []
        errors: list[MlbenchError] = []
        for channel, answer in zip(channels, answers, strict=True):
            if isinstance(answer, MlbenchError):
                errors.append(answer)
            else:
                found.append({**answer, "host": channel.target.name})
        if errors and not found:
            raise errors[0]
        return found

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
        """Copy the code, unless a folder with its digest exists already."""
        data, sha256 = pack_code()
        folder = f"{self._base_details.folder}/code"
        if channel.call("install", folder=folder, sha256=sha256)["folder"] is None:
            channel.call("install", data, folder=folder, sha256=sha256)

    def _claim_request(self, run: Run) -> ChannelRequest:
        """Writes the run's record into its folder, unless one is there: the answer's `written` says which."""
        document = {"id": run.id, "created": run.created, "spec": run.spec.to_dict(), "spec_hash": run.spec.hash}
        data = (json.dumps(document, sort_keys=True) + "\n").encode()
        return ChannelRequest("put", {"path": f"{self._run_place(run)}/run.json", "new": True}, data)

    def _is_taken(self, channel: Channel, run: Run) -> bool:
        """Whether the run's folder is that of another run, which a client of another machine may have started."""
        _, known = channel.exchange("get", path=f"{self._run_place(run)}/run.json")
        return bool(known) and json.loads(known)["id"] != run.id

    def _check_owner(self, channel: Channel, run: Run) -> None:
        """Raises UsageError if the run's folder is that of another run."""
        if self._is_taken(channel, run):
            raise UsageError(
                f'{channel.target.name} has another run "{run.name}" in {self._run_place(run)}.',
                hint=f"mlbench status --refresh, then mlbench delete {run.name}; or choose another name",
            )


def check_folder(facts: Document, folder: str, name: str, option: str) -> None:
    """Reject a folder for runs that the machine `name`, whose `hello` has these facts, cannot use. Raises UsageError,
    CapacityError for a full disk."""
    if not facts["writable"]:
        raise UsageError(f"Cannot create the folder {folder} on {name}, or write to it.", hint=option)
    if int(facts["free_bytes"]) < MIN_FREE_BYTES // 20:
        free = int(facts["free_bytes"]) >> 20
        raise CapacityError(f"{name} has {free} MiB free in {folder}.", hint=f"Free up disk space, or use {option}")


def warn_of_torch(torch: str | None) -> list[str]:
    """What is to be said of the version of torch on the machines; empty: they have none."""
    if not torch:
        return ["The machines' Python has no torch, which tasks need. Use --python PATH, or --setup FILE with Slurm."]
    version = tuple(int(number) for number in re.findall(r"\d+", torch)[:2])
    if version >= OLDEST_TORCH:
        return []
    oldest = ".".join(map(str, OLDEST_TORCH))
    return [f"The machines have torch {torch}; mlbench's training tasks need {oldest} or later. Use --python PATH."]


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
