"""Makes and removes clusters, whoever's they are: the one place where crash-safety is decided.

`up` notes each intent on disk before it asks for anything, adopts what it finds, and looks before it judges a failed
request. `down` works from names and marks alone, on any machine, in any state, and verifies that nothing is left.
Killed anywhere and started again, both go on where they were. Independent resources are made at the same time; the
waits are all that takes long, so one thread polls them in turn.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlbench_cli.errors import (
    CleanupError,
    CredentialError,
    DeadlineError,
    Interrupted,
    MlbenchError,
    NotFoundError,
    Terminated,
    UsageError,
)
from mlbench_cli.model import Cluster
from mlbench_cli.store import Store
from mlbench_cli.times import timestamp
from providers.base import Resource, ResourceStatus, TransientError, foreign_resource_error
from providers.operation_errors import (
    delete_command,
    explain_error,
    failure_record,
    incomplete_deletion_error,
    leftover_entry,
)
from providers.timeline import Timeline

# How long something may fail in a way that repeating can cure before it counts as failed, in seconds.
PATIENCE_SECONDS = 120.0
STOPPED = (Interrupted, Terminated)
# The journal's words for a cluster as a whole, and for its end.
CLUSTER, REMOVED = "cluster", "removed"


@dataclass(frozen=True)
class Step:
    """What just happened to a resource. `seconds` since work on it began, of at most `deadline`."""

    cluster: str
    kind: str
    name: str
    action: str  # creating adopted waiting ready retrying remaking deleting deleted kept foreign
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
    """Make what is missing of `cluster` and return its record, with the time that each resource took under `times`.

    Where it fails, what exists stays, so that the same call goes on; the error says what that is and how to remove it,
    and so does the record, under "failure".
    """
    with _exclusive(store, cluster.name):
        before = _find_record(store, cluster.name)
        earlier = before.details.get(times, []) if before is not None and times == "provisioning" else []
        making = Creation(cluster, resources, store, report, patience, Timeline(resources, earlier), times)
        making.record("creating")
        try:
            making.run()
        except BaseException as error:
            if making.has_side_effects:
                making.record("failed", failure=failure_record(error))
            elif before is not None:
                store.record_cluster(before)
            else:
                store.forget_cluster(cluster.name)
            told = explain_error(error, cluster, making.existing())
            if told is error:
                raise
            raise told from error
        return making.record("ready")


def down(
    cluster: Cluster,
    resources: Sequence[Resource],
    store: Store,
    *,
    report: Report = lambda step: None,
    patience: float = PATIENCE_SECONDS,
) -> None:
    """Remove `cluster`, as much of it as there is. Raises CleanupError listing what is left after all was tried.

    The record goes with it, but for what the journal keeps: how long everything took is a result that stays.
    """
    with _exclusive(store, cluster.name):
        timeline = Timeline(resources, cluster.details.get("removal", []), removing=True)
        removing = Deletion(cluster, resources, store, report, patience, timeline, "removal")
        try:
            removing.run()
        except (KeyboardInterrupt, Terminated) as error:
            stopped = Terminated if isinstance(error, Terminated) else Interrupted
            raise stopped(
                f'Stopped: of the cluster "{cluster.name}" something may be left.',
                hint=f"{delete_command(cluster)}   goes on with it",
            ) from error
        except CleanupError as error:
            if removing.recorded:
                removing.record("deleting", failure=failure_record(error))
            raise
        if removing.recorded:
            last = removing.record("deleting")
            store.journal(
                *(cluster.name, CLUSTER, cluster.name, REMOVED),
                provider=last.provider, created=last.created, details=last.details,
            )  # fmt: skip
        store.forget_cluster(cluster.name)


def find_deleted_cluster(store: Store, name: str) -> Cluster | None:
    """The last record of a cluster of that name that was removed, with the time of its removal; None without one."""
    for entry in reversed(store.journal_of(name)):
        if entry.kind == CLUSTER and entry.action == REMOVED:
            kept = entry.details
            details = {**kept["details"], "removed": timestamp(entry.time)}
            return Cluster(name, kept["provider"], REMOVED, kept["created"], details)
    return None


@dataclass(eq=False)
class ResourceState:
    """Where the work on one resource stands. Times are of the monotonic clock."""

    resource: Resource
    began: float | None = None
    asked: bool = False  # this process has sent a request for it, answered or not
    accepted: bool = False  # it exists: the request was accepted, or it was adopted
    adopted: bool = False
    was_there: bool = False
    done: bool = False
    failed: str | None = None  # why it could not be removed
    trouble: float | None = None  # since when nothing but trouble
    next_visit: float = 0.0

    def seconds(self) -> float:
        return 0.0 if self.began is None else time.monotonic() - self.began


@dataclass
class Operation:
    """What making and removing have in common: visiting tasks in turn, each as often as its waiting makes sensible."""

    cluster: Cluster
    resources: Sequence[Resource]
    store: Store
    report: Report
    patience: float
    timeline: Timeline
    times: str  # under which of the cluster's details the timeline goes
    tasks: list[ResourceState] = field(default_factory=list)

    def record(self, state: str, **more: Any) -> Cluster:
        """Write down how far it is: what a killed process leaves, and what another one can show meanwhile."""
        details = {key: value for key, value in self.cluster.details.items() if key not in ("failure", self.times)}
        times = {self.times: self.timeline.to_list()}
        return self.store.record_cluster(replace(self.cluster, state=state, details={**details, **times, **more}))

    def visit_all(self, possible: Callable[[ResourceState], bool], visit: Callable[[ResourceState], None]) -> None:
        """Visit all that is `possible` until nothing is. A visit ends a task by setting `done` or `failed`."""
        while True:
            due = [task for task in self.tasks if not task.done and task.failed is None and possible(task)]
            if not due:
                return
            task = min(due, key=lambda task: task.next_visit)
            time.sleep(max(0.0, task.next_visit - time.monotonic()))
            if task.began is None:
                task.began = time.monotonic()
            visit(task)
            task.next_visit = time.monotonic() + _poll_interval(task.seconds())

    def error_budget_spent(self, task: ResourceState, reason: str) -> bool:
        """Note trouble; True when it has lasted longer than is to be borne."""
        if task.trouble is None:
            task.trouble = time.monotonic()
        self.notify(task, "retrying", reason)
        return time.monotonic() - task.trouble >= self.patience

    def journal(self, task: ResourceState, action: str, **details: Any) -> None:
        self.store.journal(self.cluster.name, task.resource.kind, task.resource.name, action, **details)

    def notify(self, task: ResourceState, action: str, reason: str = "", deadline: float | None = None) -> None:
        resource = task.resource
        self.report(Step(self.cluster.name, resource.kind, resource.name, action, reason, task.seconds(), deadline))


class Creation(Operation):
    def run(self) -> None:
        self.tasks = [ResourceState(resource) for resource in self.resources]
        self.visit_all(self._possible, self._visit)

    @property
    def has_side_effects(self) -> bool:
        """Whether there is something that this process asked for, or that was found half made."""
        return any(task.asked or (task.adopted and not task.done) for task in self.tasks)

    def existing(self) -> list[dict[str, str]]:
        """What exists, or may exist, of the cluster."""
        return [
            {"kind": task.resource.kind, "name": task.resource.name, "state": self._state(task)}
            for task in self.tasks
            if task.asked or task.accepted
        ]

    def _state(self, task: ResourceState) -> str:
        if not task.accepted:
            return "perhaps"
        return "ready" if task.done else "being made"

    def _possible(self, task: ResourceState) -> bool:
        return all(other.done for other in self.tasks if any(other.resource is need for need in task.resource.needs))

    def _visit(self, task: ResourceState) -> None:
        reason = "it is still to be made"
        self.timeline.of(task.resource).record_time("began")
        try:
            if not task.accepted:
                self._ask(task)
            if task.accepted:
                progress = task.resource.poll()
                reason = progress.reason or "it is not ready"
                task.done = progress.ready
            task.trouble = None
        except TransientError as error:
            if self.error_budget_spent(task, error.message):
                raise
            reason = error.message
        line = self.timeline.of(task.resource)
        if task.done:
            line.end_wait()
            line.record_time("ready")
            self.record("creating")
            self.journal(task, "ready", seconds=round(task.seconds(), 3), adopted=task.adopted)
            self.notify(task, "ready")
            return
        if line.start_wait(reason):
            self.record("creating")
        if task.seconds() > task.resource.create_seconds:
            raise DeadlineError(
                f'The {task.resource.kind} "{task.resource.name}" was not ready after '
                f"{task.resource.create_seconds:.0f} s: {reason}."
            )
        if task.trouble is None:
            self.notify(task, "waiting", reason, task.resource.create_seconds)

    def _ask(self, task: ResourceState) -> None:
        resource = task.resource
        found = resource.find()
        if found is None:
            self._create(task)
            return
        if not found.ours:
            raise foreign_resource_error(resource)
        if found.differs:
            raise UsageError(
                f'The {resource.kind} "{resource.name}" exists already, with other settings: {found.differs}.',
                hint=f"Choose another name, or first: {delete_command(self.cluster)}",
            )
        if found.broken and not found.deleting:
            self.journal(task, "deleting", reason=found.broken)
            self.timeline.of(resource).reset()
            self.notify(task, "remaking", found.broken, resource.create_seconds)
            task.asked = True
            resource.delete()
        elif not found.deleting:
            task.accepted = task.adopted = True
            self.timeline.of(resource).mark_adopted()
            self.journal(task, "adopted", state=found.state)
            self.notify(task, "adopted", found.state, resource.create_seconds)

    def _create(self, task: ResourceState) -> None:
        self.journal(task, "intent")
        self.record("creating")
        self.notify(task, "creating", deadline=task.resource.create_seconds)
        # Set before the call: where that is cut off nobody knows whether the request has arrived.
        task.asked = True
        resource = task.resource
        try:
            resource.create()
        except (TransientError, *STOPPED):
            raise  # repeated, the next visit looks for it first
        except MlbenchError as error:
            exists = _was_created(resource)
            if not exists:
                self.journal(task, "failed", reason=error.message)
                task.asked = exists is None
                raise
        task.accepted = True
        self.timeline.of(resource).record_time("accepted")
        self.journal(task, "created")


class Deletion(Operation):
    def run(self) -> None:
        self.tasks = [ResourceState(resource) for resource in reversed(self.resources) if resource.goes_with is None]
        self.foreign: list[Resource] = []
        self.recorded = False
        self.visit_all(self._possible, self._visit)
        self._verify()

    def _possible(self, task: ResourceState) -> bool:
        return all(other.done for other in self._dependents(task))

    def _dependents(self, task: ResourceState) -> list[ResourceState]:
        """The tasks whose resources need this one's, so that it has to stay as long as they do."""
        found = []
        for other in self.tasks:
            parts = [part for part in self.resources if part is other.resource or part.goes_with is other.resource]
            needs = [need for part in parts for need in part.needs]
            if other is not task and any(need is task.resource for need in needs):
                found.append(other)
        return found

    def _visit(self, task: ResourceState) -> None:
        resource = task.resource
        try:
            found = resource.find()
            if found is None or not found.ours or found.kept:
                self._end(task, found)
                return
            task.was_there = True
            self.timeline.of(resource).record_time("began")
            if found.deleting or found.busy:
                task.trouble = None
                self._wait(task, found.busy or found.state)
                self.notify(task, "deleting", found.busy or found.state, resource.delete_seconds)
            else:
                self._ask(task, found)
        except TransientError as error:
            if self.error_budget_spent(task, error.message):
                self._fail(task, error.message)
        except STOPPED:
            raise
        except MlbenchError as error:
            if isinstance(error, CredentialError) and not self.recorded:
                raise  # nothing was done, and nothing can be
            self._fail(task, error.message)
        else:
            if task.seconds() > resource.delete_seconds:
                reason = found.busy or found.state
                self._fail(task, f"it was still there after {resource.delete_seconds:.0f} s: {reason}")

    def _ask(self, task: ResourceState, found: ResourceStatus) -> None:
        """Ask for the removal; again where it was asked for and does not go, until patience ends."""
        if task.asked and self.error_budget_spent(task, found.broken or found.state):
            self._fail(task, found.broken or f"it does not go: {found.state}")
            return
        if not self.recorded:
            self.recorded = True
            self.record("deleting")
        if not task.asked:
            self.journal(task, "deleting")
            self.notify(task, "deleting", found.state, task.resource.delete_seconds)
        task.resource.delete()
        task.asked = True

    def _wait(self, task: ResourceState, reason: str) -> None:
        if self.timeline.of(task.resource).start_wait(reason) and self.recorded:
            self.record("deleting")

    def _end(self, task: ResourceState, found: ResourceStatus | None) -> None:
        task.done = True
        if found is not None and not found.ours:
            self.foreign.append(task.resource)
            self.notify(task, "foreign", found.state)
        elif found is not None:
            self.notify(task, "kept", found.kept or "")
        elif task.was_there:
            line = self.timeline.of(task.resource)
            line.end_wait()
            line.record_time("gone")
            self.journal(task, "deleted", seconds=round(task.seconds(), 3))
            self.notify(task, "deleted")

    def _fail(self, task: ResourceState, reason: str) -> None:
        task.failed = reason
        self.journal(task, "failed", reason=reason)

    def _verify(self) -> None:
        """Look once more at every resource, also those that went with another. Raises CleanupError for what is left."""
        left = []
        reasons = {_key(task): task.failed for task in self.tasks if task.failed}
        for resource in self.resources:
            try:
                found = self._look(resource)
            except STOPPED:
                raise
            except MlbenchError as error:
                left.append(leftover_entry(resource, f"unknown: {error.message}"))
                continue
            if found is not None and found.ours and not found.kept:
                key = (resource.kind, resource.name)
                left.append(
                    leftover_entry(resource, reasons.get(key, "not tried, since something that needs it is left"))
                )
        if left:
            raise incomplete_deletion_error(self.cluster, left)
        if self.foreign and not self.recorded:
            raise foreign_resource_error(self.foreign[0])

    def _look(self, resource: Resource) -> ResourceStatus | None:
        began = time.monotonic()
        while True:
            try:
                return resource.find()
            except TransientError:
                waited = time.monotonic() - began
                if waited >= self.patience:
                    raise
                time.sleep(_poll_interval(waited))


def _was_created(resource: Resource) -> bool | None:
    """Whether a request that was answered with an error has made the resource all the same; None where nobody knows."""
    try:
        found = resource.find()
    except STOPPED:
        raise
    except MlbenchError:
        return None
    return found is not None and found.ours and not found.broken and not found.deleting


def _key(task: ResourceState) -> tuple[str, str]:
    return task.resource.kind, task.resource.name


def _poll_interval(waited: float) -> float:
    """Seconds between two looks: a fortieth of the wait so far, so that no wait is prolonged by more than that."""
    return min(max(0.02, waited / 40), 10.0)


def _find_record(store: Store, name: str) -> Cluster | None:
    try:
        return store.cluster(name)
    except NotFoundError:
        return None


def is_operation_running(store: Store, name: str) -> bool:
    """Whether a process of this data directory is making or removing the cluster just now."""
    try:
        with open(_lock_path(store, name)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def _exclusive(store: Store, name: str) -> Iterator[None]:
    """Keep two processes of this data directory from working on one cluster at a time. A killed one leaves no lock."""
    path = _lock_path(store, name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UsageError(
                f'Another mlbench (process {file.read().strip() or "?"}) is at work on the cluster "{name}".',
                hint="Wait for it, or stop it.",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _lock_path(store: Store, name: str) -> Path:
    return store.folder / "clusters" / f"{name}.lock"
