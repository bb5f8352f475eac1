"""The engine of plain hosts: each run has a folder and one agent on each of its hosts.

Agents end with their run. A run outlives its client.
"""

import json
import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from mlbench_cli.agent.channel import Channel, ChannelRequest, Document
from mlbench_cli.agent.lock import SHARE, TAKE
from mlbench_cli.agent.rendezvous import RENDEZVOUS
from mlbench_cli.engines.base import Submission
from mlbench_cli.engines.machines.details import HostsDetails
from mlbench_cli.engines.machines.engine import MachinesEngine, Place, do_all, run_in_parallel
from mlbench_cli.engines.machines.observe import Snapshot
from mlbench_cli.engines.machines.placement import NodeShare, share_hosts
from mlbench_cli.engines.machines.plan import make_plan, start_command
from mlbench_cli.errors import MlbenchError, NeverStartedError, UnreachableError
from mlbench_cli.model.run import Ending, Finding, Observation, Run
from mlbench_cli.model.spec import RunSpec

START_SECONDS = 60.0
FILES_PER_CHANNEL = 3  # standard input, output and errors of ssh
SPARE_FILES = 256


class HostsEngine(MachinesEngine):
    """Executes runs on the hosts that `details` list."""

    dies_with_client = False

    def __init__(self, details: HostsDetails) -> None:
        super().__init__(details)
        self._details = details
        self._by_host = {host["name"]: Channel(details.target(host)) for host in details.hosts}
        _allow_open_files(FILES_PER_CHANNEL * len(self._by_host))

    def render(self, spec: RunSpec) -> Submission:
        """The plan of the run's agents. Raises CapacityError for more workers than slots, UsageError."""
        shares = share_hosts(self._details.hosts, spec)
        lock = SHARE if spec.share_machine else TAKE
        return Submission(spec, ({**make_plan(spec, self._details, shares, lock=lock)},))

    # --- submit -----------------------------------------------------------------------------------------------------

    def submit(self, run: Run, submission: Submission, *, detach: bool = False) -> None:
        """Prepare all hosts, then start an agent on each. A second call completes what is missing."""
        places = self._places(run)
        (plan,) = submission.documents
        data = json.dumps(plan, sort_keys=True).encode()
        answers = run_in_parallel(lambda place: self._prepare(run, place, data), places)
        errors = [answer for answer in answers if isinstance(answer, MlbenchError)]
        if errors:
            _remove_claims(places, answers)
            raise errors[0]
        for place, answer in zip(places, run_in_parallel(self._start, places), strict=True):
            if isinstance(answer, MlbenchError):
                self.cancel(run)
                raise NeverStartedError(
                    f"{place.channel.target.name} could not start {run.name}: {answer.message}", hint=answer.hint
                )
        self._introduce(run, places)

    def resume(self, run: Run) -> None:
        """Start the agents that a dead client has not started, if the others still wait for them."""
        places = self._places(run)
        snapshot = self._sync(run)
        if not snapshot.exists or snapshot.is_cancelled or snapshot.unreachable or snapshot.is_over:
            return
        if all((report.state or {}).get("started") for report in snapshot.nodes.values()):
            return
        (plan,) = self.render(run.spec).documents
        data = json.dumps(plan, sort_keys=True).encode()
        do_all(lambda place: self._prepare(run, place, data), places)
        run_in_parallel(self._start, places)
        self._introduce(run, places)

    def _prepare(self, run: Run, place: Place, plan: bytes) -> Document:
        channel = place.channel
        self._install_code(channel)
        (claim,) = channel.call_in_sequence([self._claim_request(run)])
        files = [ChannelRequest("put", {"path": f"{place.folder}/plan.json", "durable": False}, plan)]
        if not claim["written"]:
            self._check_owner(channel, run)
        channel.call_in_sequence(files)
        return claim

    def _start(self, place: Place) -> Document:
        """Start the host's agent unless it was started before: its folder is made by one process only."""
        own = f"{place.folder}/nodes/{place.nodes[0]}"
        command = [*start_command(self._details.python, self._code_folder), own]
        if place.channel.call("get", path=f"{own}/.state/supervisor.lock")["size"] is not None:
            return {}
        return place.channel.call("spawn", argv=command, log=f"{place.folder}/supervisor.log", cwd=place.folder)

    def _introduce(self, run: Run, places: Sequence[Place]) -> None:
        """Tell the other hosts how to reach the first one."""
        if len(places) == 1:
            return
        first = places[0]
        note = first.channel.call(
            "await_file", path=f"{first.folder}/{RENDEZVOUS}", timeout=START_SECONDS, seconds=START_SECONDS + 20
        )
        if note["text"] is None:
            _, data = first.channel.exchange("get", path=f"{first.folder}/supervisor.log")
            lines = data.decode("utf-8", "replace").strip().splitlines()
            raise NeverStartedError(
                f"The agent on {first.channel.target.name} does not start: {lines[-1] if lines else 'no reason'}",
                hint=f"mlbench cancel {run.name}",
            )
        text = str(note["text"]).encode()
        do_all(lambda place: place.channel.call("put", text, path=f"{place.folder}/{RENDEZVOUS}"), places[1:])

    # --- look -------------------------------------------------------------------------------------------------------

    def _shares(self, spec: RunSpec) -> Sequence[NodeShare]:
        return share_hosts(self._details.hosts, spec)

    def _places(self, run: Run) -> Sequence[Place]:
        folder = self._run_place(run)
        shares = self._shares(run.spec)
        return [Place(self._by_host[str(share.name)], folder, (node,)) for node, share in enumerate(shares)]

    def _channels(self) -> Sequence[Channel]:
        return list(self._by_host.values())

    def _judge(self, run: Run, snapshot: Snapshot, observation: Observation) -> Observation:
        if observation.ended is not None or snapshot.unreachable:
            return observation
        if not snapshot.exists:
            finding = Finding(
                "folder_gone", "The run has no folder on its hosts: it was not submitted, or has been removed."
            )
            ended = Ending.LOST if (run.folder / "manifests" / "plan.json").exists() else Ending.NEVER_STARTED
            return replace(observation, ended=ended, findings=(*observation.findings, finding))
        begun = [report for report in snapshot.nodes.values() if report.state is not None]
        if snapshot.is_cancelled and all(report.is_over for report in begun):
            return replace(observation, ended=Ending.CANCELLED)
        if len(begun) < len(snapshot.nodes) and begun and all(report.is_over for report in begun):
            return replace(observation, ended=Ending.NEVER_STARTED)
        return observation

    # --- end --------------------------------------------------------------------------------------------------------

    def _stop(self, run: Run, places: Sequence[Place]) -> None:
        """Kill leftovers: a stopped agent, or ranks without an agent."""
        snapshot = self._await_end(run)
        if snapshot.is_over:
            return
        for place in places:
            report = snapshot.nodes.get(place.nodes[0])
            if report is not None and not report.has_ended:
                try:
                    place.channel.call("end_processes", folder=place.folder)
                except UnreachableError:
                    continue


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files as far as it may: the usual 1 024 are enough for 250 hosts only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _remove_claims(places: Sequence[Place], answers: Sequence[Document | MlbenchError]) -> None:
    """Remove what a submission that failed on one host has made on the others; what was there before stays."""
    for place, answer in zip(places, answers, strict=True):
        if not isinstance(answer, MlbenchError) and answer["written"]:
            with suppress(MlbenchError):
                place.channel.call("remove", folder=place.folder)
