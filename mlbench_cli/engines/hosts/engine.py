"""The engine of plain hosts: each run has a folder and one agent on each of its hosts.

Agents end with their run. The first host has the run's head, to which the others send what they write. A run outlives
its client.
"""

import json
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from mlbench_cli.agent.channel import Channel, ChannelRequest, Document
from mlbench_cli.agent.link import HEAD
from mlbench_cli.agent.lock import SHARE, TAKE
from mlbench_cli.agent.messages import STARTED
from mlbench_cli.engines.base import Submission
from mlbench_cli.engines.machines.details import HostsDetails
from mlbench_cli.engines.machines.engine import MachinesEngine, run_in_parallel
from mlbench_cli.engines.observe import STALE_SECONDS, Snapshot, find_ending, find_first
from mlbench_cli.engines.placement import NodeShare, share_hosts
from mlbench_cli.engines.plan import make_plan
from mlbench_cli.errors import MlbenchError, NeverStartedError, UnreachableError
from mlbench_cli.isolation import isolated_command
from mlbench_cli.model.run import Ending, Observation, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.util.files import allow_open_files

START_SECONDS = 60.0
FILES_PER_CHANNEL = 3  # standard input, output and errors of ssh
SPARE_FILES = 256


class HostsEngine(MachinesEngine):
    """Executes runs on the hosts that `details` list."""

    def __init__(self, details: HostsDetails) -> None:
        super().__init__(details)
        self._details = details
        self._by_host = {host["name"]: Channel(details.target(host)) for host in details.hosts}
        allow_open_files(SPARE_FILES + FILES_PER_CHANNEL * len(self._by_host))

    def render(self, spec: RunSpec) -> Submission:
        """The plan of the run's agents. Raises CapacityError for more workers than slots, UsageError."""
        shares = share_hosts(self._details.hosts, spec)
        lock = SHARE if spec.share_machine else TAKE
        return Submission(spec, ({**make_plan(spec, self._details, shares, lock=lock)},))

    # --- submit -----------------------------------------------------------------------------------------------------

    def submit(self, run: Run, submission: Submission) -> None:
        """Prepare all hosts, then start the head, and an agent on each. A second call completes what is missing."""
        head, *others = self._channels(run)
        (plan,) = submission.documents
        data = json.dumps(plan, sort_keys=True).encode()
        # The head's host first: a run without a folder there counts as never submitted, and nobody goes on with it.
        claim = self._prepare(run, head, data)
        answers = [claim, *run_in_parallel(lambda channel: self._prepare(run, channel, data), others)]
        if errors := _find_errors(run, answers):
            self._remove_claims(run, [head, *others], answers)
            raise errors[0]
        self._start_head(run)
        self._start_agents(run)

    def resume(self, run: Run) -> None:
        """Start what a dead client has not started, if the others still wait for it, and a head that was killed."""
        snapshot = self.head(run).read()
        if not snapshot.exists or snapshot.is_over:
            return
        if not snapshot.is_served:
            self._start_head(run)
        started = [bool((report.state or {}).get("started")) for report in snapshot.nodes.values()]
        if snapshot.is_canceled or all(started) or (started[0] and run.spec.absent_seconds is not None):
            return
        self.submit(run, self.render(run.spec))

    def _prepare(self, run: Run, channel: Channel, plan: bytes) -> Document:
        self._install_code(channel)
        (claim,) = channel.call_in_sequence([self._claim_request(run)])
        files = [ChannelRequest("put", {"path": f"{self._run_place(run)}/plan.json", "durable": False}, plan)]
        if not claim["written"]:
            self._check_owner(channel, run)
        channel.call_in_sequence(files)
        return claim

    def _remove_claims(self, run: Run, channels: Sequence[Channel], answers: Sequence[Document | MlbenchError]) -> None:
        """Remove what a submission that failed on one host has made on the others; what was there before stays."""
        for channel, answer in zip(channels, answers, strict=True):
            if not isinstance(answer, MlbenchError) and answer["written"]:
                with suppress(MlbenchError):
                    channel.call("remove", folder=self._run_place(run))

    def _start_head(self, run: Run) -> None:
        """Start the run's head on the first host, unless one serves the run already, and tell the others of it."""
        head, *others = self._channels(run)
        if not others:
            return
        folder = self._run_place(run)
        command = [*isolated_command("mlbench_cli.agent.head", self._details.python, self._code_folder), folder]
        head.call("spawn", argv=command, log=f"{folder}/supervisor.log", cwd=folder)
        note = head.call("await_file", path=f"{folder}/{HEAD}", timeout=START_SECONDS, seconds=START_SECONDS + 20)
        if note["text"] is None:
            _, data = head.exchange("get", path=f"{folder}/supervisor.log")
            lines = data.decode("utf-8", "replace").strip().splitlines()
            raise NeverStartedError(
                f"The head of the run does not start on {head.target.name}: {lines[-1] if lines else 'no reason'}",
                hint=f"mlbench cancel {run.name}",
            )
        text = str(note["text"]).encode()
        answers = run_in_parallel(lambda channel: channel.call("put", text, path=f"{folder}/{HEAD}"), others)
        if errors := _find_errors(run, [note, *answers]):
            raise errors[0]

    def _start_agents(self, run: Run) -> None:
        """Start each host's agent. Raises NeverStartedError, after cancelling, if one cannot be started."""
        places = list(enumerate(self._channels(run)))
        answers = run_in_parallel(lambda place: self._start(run, *place), places)
        errors = _find_errors(run, answers)
        for (_, channel), answer in zip(places, answers, strict=True):
            if isinstance(answer, MlbenchError) and answer in errors:
                self.cancel(run)
                raise NeverStartedError(
                    f"{channel.target.name} could not start {run.name}: {answer.message}", hint=answer.hint
                )

    def _start(self, run: Run, node: int, channel: Channel) -> Document:
        """Start a host's agent unless it was started before."""
        folder = self._run_place(run)
        own = f"{folder}/nodes/{node}"
        if channel.call("get", path=f"{own}/{STARTED}", size=0)["size"] is not None:
            return {}
        command = [*isolated_command("mlbench_cli.agent.node", self._details.python, self._code_folder), own]
        return channel.call("spawn", argv=command, log=f"{folder}/supervisor.log", cwd=folder)

    # --- look -------------------------------------------------------------------------------------------------------

    def _shares(self, spec: RunSpec) -> Sequence[NodeShare]:
        return share_hosts(self._details.hosts, spec)

    def _channels(self, run: Run | None = None) -> Sequence[Channel]:
        if run is None:
            return list(self._by_host.values())
        return [self._by_host[str(share.name)] for share in self._shares(run.spec)]

    def _judge(self, run: Run, snapshot: Snapshot, observation: Observation) -> Observation:
        if observation.ended is not None:
            return observation
        if not snapshot.is_served and snapshot.shows_life:
            self._start_head(run)  # it was killed, or its machine has started again
        begun = [report for report in snapshot.nodes.values() if report.state is not None]
        if snapshot.is_canceled and all(report.is_over for report in begun):
            return replace(observation, ended=Ending.CANCELED)
        is_short = len(begun) < len(snapshot.nodes) and run.spec.absent_seconds is None
        if not (is_short and begun and all(report.is_over for report in begun)):
            return observation
        if not any(report.state["started"] for report in begun if report.state is not None):
            return replace(observation, ended=Ending.NEVER_STARTED)
        # Ranks start when all nodes have met, so what the others say is on its way to the head.
        if any(report.beat_age is not None and report.beat_age < STALE_SECONDS for report in begun):
            return observation
        return replace(observation, ended=find_ending(snapshot, find_first(snapshot)))

    # --- end --------------------------------------------------------------------------------------------------------

    def _stop(self, run: Run) -> None:
        """Kill leftovers: a stopped agent, or ranks without an agent; not an agent that still packs their output."""
        snapshot = self._await_end(run, may_start=True)
        if snapshot.is_over:
            return
        for node, channel in enumerate(self._channels(run)):
            state = snapshot.nodes[node].state
            if state is None or not state["ended"]:
                with suppress(UnreachableError):
                    channel.call("end_processes", folder=self._run_place(run))


def _find_errors(run: Run, answers: Sequence[Document | MlbenchError]) -> list[MlbenchError]:
    """The errors of hosts, in the order of the hosts. Some runs start without hosts that cannot be reached."""
    return [
        answer
        for number, answer in enumerate(answers)
        if isinstance(answer, MlbenchError)
        and (number == 0 or run.spec.absent_seconds is None or not isinstance(answer, UnreachableError))
    ]
