"""Creates and deletes clusters of all providers; everything about surviving crashes is here.

`up` journals each intent on disk before it sends a request, adopts existing resources, and looks for a resource again
before it counts a request as failed. `down` works from names and ownership tags alone, on any machine and in any state,
and verifies at the end that no resource is left. Both can be killed at any time and repeated. Independent resources are
created at the same time. Waiting takes nearly all the time, so one thread polls them in turn.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from mlbench_cli.agent.processes import try_lock
from mlbench_cli.errors import (
    CleanupError,
    CredentialError,
    DeadlineError,
    Explanation,
    Interrupted,
    MlbenchError,
    Stopped,
    Terminated,
    UsageError,
)
from mlbench_cli.model.cluster_details import ClusterDetails, TimesRecord
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import CLUSTER, REMOVED, Store
from providers.base import (
    BusyError,
    ExistsError,
    Resource,
    ResourceStatus,
    TransientError,
    delete_command,
    foreign_resource_error,
)

# Transient errors of one resource that last longer than this count as a failure, in seconds.
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Step:
    """Progress on one resource. `seconds` have passed since work on it began; it fails after `deadline` seconds."""

    cluster: str
    kind: str
    name: str
    action: str  # creating adopted waiting ready retrying recreating deleting deleted kept foreign
    reason: str = ""
    seconds: float = 0.0
    deadline: float | None = None


Report = Callable[[Step], None]


def up(
    cluster: Cluster,
    resources: Sequence[Resource],
    store: Store,
    *,
    report: Report = lambda step: None,
    patience: float = PATIENCE_SECONDS,
    times: str = "provisioning",
) -> Cluster:
    """Create the missing resources of `cluster` and return its record, with the times of each resource under `times`.

    Raises MlbenchError if a resource fails. Existing resources stay, and the same call continues with them. The error
    lists them with the command that deletes them; the record keeps the error under "failure".
    """
    with hold_operation_lock(store, cluster.name):
        before = store.find_cluster(cluster.identity)
        earlier = ClusterDetails.of(before).provisioning if before is not None and times == "provisioning" else []
        creation = Creation(cluster, resources, store, report, patience, Timeline(resources, earlier), times)
        owners = (ClusterDetails.of(item).owner for item in (cluster, before) if item is not None)
        creation.owners, creation.is_new = frozenset(filter(None, owners)), before is None
        if before is not None and _registry(before) != _registry(cluster):
            creation.keep = ()  # digests are of the registry that they were pushed to
        creation.record("creating")
        try:
            creation.run()
        except BaseException as error:
            if creation.has_side_effects:
                creation.record("failed", failure=failure_record(error))
            elif before is not None:
                store.record_cluster(before)
            else:
                store.forget_cluster(cluster)
            explained = explain_error(error, cluster, creation.existing())
            if explained is error:
                raise
            raise explained from error
        return creation.record("ready")


def down(
    cluster: Cluster,
    resources: Sequence[Resource],
    store: Store,
    *,
    report: Report = lambda step: None,
    patience: float = PATIENCE_SECONDS,
) -> None:
    """Delete all existing resources of `cluster`. Raises CleanupError listing those that could not be deleted.

    The record is dropped too. The journal keeps its last state, because the times of each resource are a result.
    """
    with hold_operation_lock(store, cluster.name):
        timeline = Timeline(resources, ClusterDetails.of(cluster).removal, removing=True)
        deletion = Deletion(cluster, resources, store, report, patience, timeline, "removal")
        try:
            deletion.run()
        except (KeyboardInterrupt, Stopped) as error:
            stopped = Terminated if isinstance(error, Terminated) else Interrupted
            raise stopped(
                f'Stopped: resources of the cluster "{cluster.name}" may remain.',
                hint=f"{delete_command(cluster)}   continues the deletion",
            ) from error
        except CleanupError as error:
            if deletion.recorded:
                deletion.record("deleting", failure=failure_record(error))
            raise
        if deletion.recorded:
            last = deletion.record("deleting")
            store.journal(
                *(cluster, CLUSTER, cluster.name, REMOVED),
                provider=last.provider, created=last.created, details=last.details,
            )  # fmt: skip
        store.forget_cluster(cluster)


# --- provisioning times: when each resource was requested, what it waited for, and when it was ready or gone ----------

# One entry of the record; times are seconds since the operation on the cluster began, null until they are known. A
# stopped operation that is continued resumes at its last recorded time; the pause between is not counted.
#
#     {"kind", "name", "adopted", "began", "accepted", "ready", "waits": [{"reason", "seconds"}]}     creation
#     {"kind", "name", "began", "gone", "waits": [...]}                                               deletion

MAX_WAITS = 20  # of one resource; later waits are added to the last one
# `mlbench_cli.model.cluster_details.TimesRecord`, as it is built up.
Entry = dict[str, Any]


class ResourceTimeline:
    """The times of one resource."""

    def __init__(self, resource: Resource, removing: bool, clock: "Timeline", earlier: Entry | None = None) -> None:
        begin: Entry = {"kind": resource.kind, "name": resource.name}
        begin |= {"began": None, "gone": None} if removing else {"adopted": False, "began": None, "accepted": None}
        begin |= {"waits": []} if removing else {"ready": None, "waits": []}
        self.entry: Entry = {**begin, **(earlier or {})}
        self._clock = clock
        self._continued = earlier is not None
        self._waiting: tuple[str, float] | None = None  # reason, and start time

    def record_time(self, what: str) -> None:
        """Record the present as the time of `what`, unless an earlier operation has recorded it."""
        if self.entry.get(what) is None:
            self.entry[what] = self._clock.now()

    def mark_adopted(self) -> None:
        """Mark as adopted: it existed before this operation, unless an earlier one of ours had begun with it."""
        self.entry["adopted"] = self.entry["adopted"] or not self._continued
        self.record_time("accepted")

    def reset(self) -> None:
        """Forget its times, because it has to be created again."""
        self.entry |= {"accepted": None, "ready": None}

    def start_wait(self, reason: str) -> bool:
        """Record what the resource waits for from now on. Returns whether the reason is new."""
        if self._waiting is not None and self._waiting[0] == reason:
            return False
        self.end_wait()
        self._waiting = (reason, self._clock.now())
        return True

    def end_wait(self) -> None:
        """End the current wait, with its seconds, if there is one."""
        self.entry["waits"] = self._waits()
        self._waiting = None

    def to_dict(self) -> Entry:
        """The entry of provisioning.json, with a wait that has not ended."""
        return {**self.entry, "waits": self._waits()}

    def _waits(self) -> list[Entry]:
        waits: list[Entry] = [dict(item) for item in self.entry["waits"]]
        if self._waiting is None:
            return waits
        reason, since = self._waiting
        seconds = round(self._clock.now() - since, 3)
        if waits and (waits[-1]["reason"] == reason or len(waits) >= MAX_WAITS):
            waits[-1]["seconds"] = round(waits[-1]["seconds"] + seconds, 3)
            return waits
        return [*waits, {"reason": reason, "seconds": seconds}]


class Timeline:
    """The times of all resources in one operation, continuing those that an earlier operation recorded."""

    def __init__(
        self, resources: Sequence[Resource], earlier: Iterable[TimesRecord] = (), *, removing: bool = False
    ) -> None:
        self._known: dict[tuple[str, str], Entry] = {(item["kind"], item["name"]): {**item} for item in earlier}
        self._since = max((_last(entry) for entry in self._known.values()), default=0.0)
        self._start = time.monotonic()
        self._lines = {
            id(item): ResourceTimeline(item, removing, self, self._known.get((item.kind, item.name)))
            for item in resources
        }

    def now(self) -> float:
        """Seconds since the operation on the cluster began."""
        return round(self._since + time.monotonic() - self._start, 3)

    def of(self, resource: Resource) -> ResourceTimeline:
        """The times of a resource of this operation."""
        return self._lines[id(resource)]

    def to_list(self) -> list[Entry]:
        """The entries of all resources with a start time; first those that only an earlier operation knows."""
        lines = [line.to_dict() for line in self._lines.values()]
        here = {(entry["kind"], entry["name"]) for entry in lines}
        others = [entry for key, entry in self._known.items() if key not in here]
        return others + [entry for entry in lines if entry["began"] is not None]


def _last(entry: Mapping[str, Any]) -> float:
    moments = [float(entry.get(key) or 0.0) for key in ("began", "accepted", "ready", "gone")]
    return max(*moments, moments[0] + sum(float(item["seconds"]) for item in entry.get("waits", [])))


# --- creation and deletion --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ResourceState:
    """Progress on one resource. Times are from the monotonic clock."""

    resource: Resource
    began: float | None = None
    announced: bool = False  # its deletion is in the journal
    requested: bool = False  # this process has sent a request for it, answered or not
    accepted: bool = False  # it exists: the request was accepted, or it was adopted
    adopted: bool = False
    was_found: bool = False
    done: bool = False
    failed: str | None = None  # why it could not be deleted
    errors_since: float | None = None  # when the current series of transient errors began
    next_visit: float = 0.0

    def seconds(self) -> float:
        """Seconds since the work on this resource began; 0.0 before."""
        return 0.0 if self.began is None else time.monotonic() - self.began


@dataclass
class Operation:
    """What creation and deletion share: visit resources in turn, each at its own poll interval."""

    cluster: Cluster
    resources: Sequence[Resource]
    store: Store
    report: Report
    patience: float
    timeline: Timeline
    times: str  # key of the cluster's details under which the timeline is recorded
    states: list[ResourceState] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)  # that resources reported when they were ready
    # Details of the record that other commands write at any time, also during this operation.
    keep: tuple[str, ...] = ("images",)

    def record(self, state: str, **more: Any) -> Cluster:
        """Record how far the operation is, so that other processes can show it, also after this one was killed."""
        details = {key: value for key, value in self.cluster.details.items() if key not in ("failure", self.times)}
        times = {self.times: self.timeline.to_list()}
        details = {**details, **self.facts, **times, **more}
        return self.store.record_cluster(msgspec.structs.replace(self.cluster, state=state, details=details), self.keep)

    def visit_all(self, possible: Callable[[ResourceState], bool], visit: Callable[[ResourceState], None]) -> None:
        """Visit all resources that are `possible` until none is. A visit ends one by setting `done` or `failed`."""
        while True:
            due = [state for state in self.states if not state.done and state.failed is None and possible(state)]
            if not due:
                return
            state = min(due, key=lambda state: state.next_visit)
            time.sleep(max(0.0, state.next_visit - time.monotonic()))
            if state.began is None:
                state.began = time.monotonic()
            visit(state)
            state.next_visit = time.monotonic() + _poll_interval(state.seconds())

    def error_budget_spent(self, state: ResourceState, reason: str) -> bool:
        """Report a transient error; True once errors have lasted longer than `patience`."""
        if state.errors_since is None:
            state.errors_since = time.monotonic()
        self.notify(state, "retrying", reason)
        return time.monotonic() - state.errors_since >= self.patience

    def journal(self, state: ResourceState, action: str, /, **details: Any) -> None:
        """Journal the next action before executing it."""
        self.store.journal(self.cluster, state.resource.kind, state.resource.name, action, **details)

    def notify(self, state: ResourceState, action: str, reason: str = "", deadline: float | None = None) -> None:
        """Report a step to the progress printer; `deadline` is in seconds from now."""
        resource = state.resource
        self.report(Step(self.cluster.name, resource.kind, resource.name, action, reason, state.seconds(), deadline))


class Creation(Operation):
    """Creates the resources in dependency order, and adopts existing ones, but not those of other owners."""

    owners: frozenset[str] = frozenset()  # who may have created the cluster; empty: anybody
    is_new: bool = False  # no earlier operation of this data folder may have created it

    def run(self) -> None:
        """Create everything and wait until it is ready. Raises the first permanent error, or DeadlineError."""
        self.states = [ResourceState(resource) for resource in self.resources]
        self.visit_all(self._possible, self._visit)

    @property
    def has_side_effects(self) -> bool:
        """Whether this process has requested a resource, or has adopted one that is not ready."""
        return any(state.requested or (state.adopted and not state.done) for state in self.states)

    def existing(self) -> list[dict[str, str]]:
        """The resources of the cluster that exist or may exist: kind, name and state of each."""
        return [
            {"kind": state.resource.kind, "name": state.resource.name, "state": self._state(state)}
            for state in self.states
            if state.requested or state.accepted
        ]

    def _state(self, state: ResourceState) -> str:
        if not state.accepted:
            return "unconfirmed"
        return "ready" if state.done else "being created"

    def _possible(self, state: ResourceState) -> bool:
        return all(other.done for other in self.states if any(other.resource is need for need in state.resource.needs))

    def _visit(self, state: ResourceState) -> None:
        reason = "it has not been created yet"
        self.timeline.of(state.resource).record_time("began")
        try:
            if not state.accepted:
                self._request(state)
            if state.accepted:
                progress = state.resource.poll()
                reason = progress.reason or "it is not ready"
                state.done, state.accepted = progress.ready, not progress.broken
                self.facts |= progress.facts
            state.errors_since = None
        except BusyError as error:
            state.errors_since = None
            reason = error.message
        except TransientError as error:
            if self.error_budget_spent(state, error.message):
                raise
            reason = error.message
        line = self.timeline.of(state.resource)
        if state.done:
            line.end_wait()
            line.record_time("ready")
            self.record("creating")
            self.journal(state, "ready", seconds=round(state.seconds(), 3), adopted=state.adopted)
            self.notify(state, "ready")
            return
        if line.start_wait(reason):
            self.record("creating")
        if state.seconds() > state.resource.create_seconds:
            raise DeadlineError(
                f'The {state.resource.kind} "{state.resource.name}" was not ready after '
                f"{state.resource.create_seconds:.0f} s: {reason}."
            )
        if state.errors_since is None:
            self.notify(state, "waiting", reason, state.resource.create_seconds)

    def _request(self, state: ResourceState) -> None:
        """Adopt the resource if it exists, create it otherwise."""
        resource = state.resource
        found = resource.find()
        if found is None:
            self._create(state)
            return
        if not found.ours:
            raise foreign_resource_error(resource)
        if self.owners and found.owner not in (None, *self.owners):
            raise UsageError(
                f'The {resource.kind} "{resource.name}" exists, and {found.owner} created it.',
                hint=f"Choose another RELEASE; or delete it, if nobody uses it: {delete_command(self.cluster)}",
            )
        if found.differs:
            raise UsageError(
                f'The {resource.kind} "{resource.name}" already exists with other settings: {found.differs}.',
                hint=f"Choose another name, or delete it first: {delete_command(self.cluster)}",
            )
        if found.broken and not found.deleting:
            self.journal(state, "deleting", reason=found.broken)
            self.timeline.of(resource).reset()
            self.notify(state, "recreating", found.broken, resource.create_seconds)
            state.requested = True
            resource.delete()
        elif not found.deleting:
            state.accepted = state.adopted = True
            self.timeline.of(resource).mark_adopted()
            self.journal(state, "adopted", state=found.state)
            self.notify(state, "adopted", found.state, resource.create_seconds)

    def _create(self, state: ResourceState) -> None:
        self.journal(state, "intent")
        self.record("creating")
        self.notify(state, "creating", deadline=state.resource.create_seconds)
        # Set before the call: if it is interrupted, the request may or may not have arrived.
        state.requested = True
        resource = state.resource
        try:
            resource.create()
        except TransientError:
            raise  # the next visit looks for the resource before it repeats the request
        except MlbenchError as error:
            exists = _was_created(resource)
            if exists and isinstance(error, ExistsError) and self.is_new and not resource.needs:
                # It was not there a moment ago: two would use the cluster, and one would delete it under the other.
                error.message += " Somebody else is creating it at this moment."
                error.hint = "Choose another name."
                exists = False
            if not exists:
                self.journal(state, "failed", reason=error.message)
                state.requested = exists is None
                raise
        state.accepted = True
        self.timeline.of(resource).record_time("accepted")
        self.journal(state, "created")


class Deletion(Operation):
    """Deletes the resources in reverse dependency order, until the cloud shows none of them."""

    def run(self) -> None:
        """Delete everything, then check again. Raises if any resource remains."""
        self.states = [ResourceState(resource) for resource in reversed(self.resources) if resource.goes_with is None]
        self.foreign: list[Resource] = []
        self.recorded = False
        self.advice: str | None = None  # against what prevents a deletion
        self.visit_all(self._possible, self._visit)
        self._verify()

    def _possible(self, state: ResourceState) -> bool:
        return all(other.done for other in self._dependents(state))

    def _dependents(self, state: ResourceState) -> list[ResourceState]:
        """The resources that need this one, which therefore has to exist as long as they do."""
        found = []
        for other in self.states:
            parts = [part for part in self.resources if part is other.resource or part.goes_with is other.resource]
            needs = [need for part in parts for need in part.needs]
            if other is not state and any(need is state.resource for need in needs):
                found.append(other)
        return found

    def _visit(self, state: ResourceState) -> None:
        resource = state.resource
        try:
            found = self._look(resource)
            if found is None or not found.ours or found.kept:
                self._end(state, found)
                return
            state.was_found = True
            self.timeline.of(resource).record_time("began")
            if found.deleting or found.busy:
                state.errors_since = None
                self._wait(state, found.busy or found.state)
                self.notify(state, "deleting", found.busy or found.state, resource.delete_seconds)
            else:
                self._request(state, found)
        except BusyError as error:
            state.errors_since, state.requested = None, False
            self._wait(state, error.message)
            self.notify(state, "deleting", error.message, resource.delete_seconds)
            self._fail_if_late(state, error.message)
        except TransientError as error:
            if self.error_budget_spent(state, error.message):
                self._fail(state, error.message)
        except MlbenchError as error:
            if isinstance(error, CredentialError) and not self.recorded:
                raise  # nothing has been deleted, and nothing can be
            self.advice = error.hint or self.advice
            self._fail(state, error.message)
        else:
            self._fail_if_late(state, found.busy or found.state)

    def _fail_if_late(self, state: ResourceState, reason: str) -> None:
        if state.seconds() > state.resource.delete_seconds:
            self._fail(state, f"it still existed after {state.resource.delete_seconds:.0f} s: {reason}")

    def _request(self, state: ResourceState, found: ResourceStatus) -> None:
        """Request the deletion, again if the resource stays, until patience ends."""
        if state.requested and self.error_budget_spent(state, found.broken or found.state):
            self._fail(state, found.broken or f"it is not being deleted: {found.state}")
            return
        if not self.recorded:
            self.recorded = True
            self.record("deleting")
        if not state.announced:
            state.announced = True
            self.journal(state, "deleting")
            self.notify(state, "deleting", deadline=state.resource.delete_seconds)
        state.resource.delete()
        state.requested = True

    def _wait(self, state: ResourceState, reason: str) -> None:
        if self.timeline.of(state.resource).start_wait(reason) and self.recorded:
            self.record("deleting")

    def _end(self, state: ResourceState, found: ResourceStatus | None) -> None:
        state.done = True
        if found is not None and not found.ours:
            self.foreign.append(state.resource)
            self.notify(state, "foreign", found.state)
        elif found is not None:
            state.resource.keep()
            self.notify(state, "kept", found.kept or "")
        elif state.was_found:
            line = self.timeline.of(state.resource)
            line.end_wait()
            line.record_time("gone")
            self.journal(state, "deleted", seconds=round(state.seconds(), 3))
            self.notify(state, "deleted")

    def _fail(self, state: ResourceState, reason: str) -> None:
        state.failed = reason
        self.journal(state, "failed", reason=reason)

    def _verify(self) -> None:
        """Look for every resource again, also for those deleted with another. Raises CleanupError if one is left."""
        left = []
        reasons = {(state.resource.kind, state.resource.name): state.failed for state in self.states if state.failed}
        for resource in self.resources:
            try:
                found = self._find(resource)
            except MlbenchError as error:
                left.append(leftover_entry(resource, f"unknown: {error.message}"))
                continue
            if found is not None and found.ours and not found.kept:
                key, parent = (resource.kind, resource.name), resource.goes_with
                why = (
                    f"it goes with the {parent.kind}"
                    if parent
                    else "not tried, because a resource that needs it remains"
                )
                left.append(leftover_entry(resource, reasons.get(key, why)))
        if left:
            raise incomplete_deletion_error(self.cluster, left, self.advice)
        if self.foreign and not self.recorded:
            raise foreign_resource_error(self.foreign[0])

    def _look(self, resource: Resource) -> ResourceStatus | None:
        """The resource's status; kept if it has the images of a cluster whose images are kept."""
        found = resource.find()
        if found is None or not (resource.holds_images and ClusterDetails.of(self.cluster).keeps_images):
            return found
        return replace(found, kept=f"--keep-images; {resource.remove_command}   deletes it")

    def _find(self, resource: Resource) -> ResourceStatus | None:
        began = time.monotonic()
        while True:
            try:
                return self._look(resource)
            except TransientError:
                waited = time.monotonic() - began
                if waited >= self.patience:
                    raise
                time.sleep(_poll_interval(waited))


def _was_created(resource: Resource) -> bool | None:
    """Whether a request that returned an error created the resource anyway; None if unknown."""
    try:
        found = resource.find()
    except MlbenchError:
        return None
    return found is not None and found.ours and not found.broken and not found.deleting


def _registry(cluster: Cluster) -> object:
    """The registry that was asked for."""
    return ClusterDetails.of(cluster).options.get("registry")


def _poll_interval(waited: float) -> float:
    """Seconds until the next poll: 1/40 of the time waited so far, so polling adds at most 2.5 % (and at most 10 s)."""
    return min(max(0.02, waited / 40), 10.0)


# --- what a failed operation leaves: messages and records -------------------------------------------------------------


def as_mlbench_error(error: BaseException) -> Explanation:
    """Any error as one with a message for the user."""
    if isinstance(error, Explanation):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Interrupted.")
    return MlbenchError(f"Internal error: {type(error).__name__}: {error}")


def failure_record(error: BaseException) -> dict[str, object]:
    """The error as the cluster's record keeps it: code, message, hint."""
    explained = as_mlbench_error(error)
    return {"code": explained.code, "message": explained.message, "hint": explained.hint}


def explain_error(error: BaseException, cluster: Cluster, existing: Sequence[Mapping[str, str]]) -> BaseException:
    """Add to `error` which resources of the cluster exist, what they cost and how to delete them.

    `existing` has kind, name and state of each. Errors that are neither exceptions nor signals come back unchanged.
    """
    if not isinstance(error, Exception | KeyboardInterrupt | Stopped):
        return error
    explained = as_mlbench_error(error)
    if not existing:
        return explained
    listed = ", ".join(f"{item['kind']} {item['name']} ({item['state']})" for item in existing)
    message = f'{explained.message}\nOf the cluster "{cluster.name}" these resources exist: {listed}.'
    details = ClusterDetails.of(cluster)
    if price := details.price_per_hour:
        message += f" They cost up to {price:.2f} {details.plan['currency']} an hour."
    elif details.plan and price is None:
        message += " Their price is unknown."
    hint = f"{delete_command(cluster)}   deletes them; to resume, repeat the command"
    if explained.hint:
        # Where the error is about what exists, its hint has the command already.
        hint = explained.hint if delete_command(cluster) in explained.hint else f"{explained.hint}\n{hint}"
    explained.message, explained.hint = message, hint
    explained.details = {**explained.details, "exists": list(existing)}
    explained.args = (message,)
    return explained


def incomplete_deletion_error(
    cluster: Cluster, left: Sequence[Mapping[str, str]], advice: str | None = None
) -> CleanupError:
    """The error for a deletion after which resources are left: kind, name, reason and command of each. `advice` comes
    before the command that continues."""
    lines = "".join(
        f"\n  {item['kind']} {item['name']}: {item['reason']}" + (f"\n    {item['command']}" if item["command"] else "")
        for item in left
    )
    return CleanupError(
        f'These resources of the cluster "{cluster.name}" remain:{lines}',
        hint="\n".join(filter(None, (advice, f"{delete_command(cluster)}   continues; or use the commands above"))),
        details={"leftovers": list(left)},
    )


def leftover_entry(resource: Resource, reason: str) -> dict[str, str]:
    """A resource that stays, in an error's document: kind, name, reason and the command that deletes it."""
    return {"kind": resource.kind, "name": resource.name, "reason": reason, "command": resource.remove_command}


# --- one operation at a time on a cluster's name, for all processes of a data folder -------------------------------


# Locks that this thread holds: what reads a record and then changes the cluster holds one lock for both.
_held: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())


def is_operation_running(store: Store, name: str) -> bool:
    """Whether a process of this data folder is creating or deleting a cluster of that name now."""
    try:
        with open(_lock_path(store, name)) as file:
            return not try_lock(file.fileno(), shared=True)
    except FileNotFoundError:
        return False


@contextmanager
def hold_operation_lock(store: Store, name: str) -> Iterator[None]:
    """Lock a cluster's name against other processes of this data folder. A killed process leaves no lock.

    A record that was read before may be old: read it again with the lock. The same thread may lock the name again.
    """
    path = _lock_path(store, name)
    if path in _held.get():
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(path, "a+") as file:
        if not try_lock(file.fileno()):
            file.seek(0)
            raise UsageError(
                f'Another mlbench (process {file.read().strip() or "?"}) is working on the cluster "{name}".',
                hint="Wait for it, or stop it.",
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        mark = _held.set(_held.get() | {path})
        try:
            yield
        finally:
            _held.reset(mark)


def _lock_path(store: Store, name: str) -> Path:
    return store.folder / "clusters" / f"{name}.lock"
