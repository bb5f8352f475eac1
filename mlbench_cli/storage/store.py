"""The store of clusters, runs, experiments and the journal of cloud requests, in SQLite.

A row is written before the first external call for it. The run's folder is authoritative; the store is the index.
Every writing method is one transaction, so a kill leaves all or nothing of it.
"""

import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from mlbench_cli.config import settings
from mlbench_cli.errors import (
    MlbenchError,
    NotFoundError,
    StoreError,
    StoreLockedError,
    UsageError,
    did_you_mean,
)
from mlbench_cli.model.run import (
    LOCAL,
    Cluster,
    ClusterIdentity,
    Experiment,
    ExperimentName,
    Member,
    Outcome,
    Run,
    RunRow,
    RunState,
)
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.store_schema import MIGRATIONS, SCHEMA_VERSION, TASK_OF_SPEC
from mlbench_cli.util.times import now, timestamp

# Kind and action of the journal entry that keeps the last record of a deleted cluster.
CLUSTER, REMOVED = "cluster", "removed"

NOTICE_SECONDS = 2.0  # before a client reports that it waits for the store
MAX_NAMED = 100  # experiments whose members are queried by id; for more, all members are read
MAX_NEAR = 500
_STATES: dict[str, RunState] = {str(state): state for state in RunState}
_OUTCOMES: dict[str | None, Outcome] = {str(outcome): outcome for outcome in Outcome}


class JournalEntry(NamedTuple):
    """One request to a cloud: intent, created, ready, deleting, deleted, failed; `time` in seconds since 1970.

    The last record of a deleted cluster is kept as "removed".
    """

    cluster: ClusterIdentity
    kind: str
    name: str
    action: str
    time: float
    details: Mapping[str, Any]


class Store:
    """The store in `folder` (default: the data folder). Safe for several clients at once.

    A client waits `patience` seconds (default: from the settings) for a locked store, then raises StoreLockedError;
    `notice` is called with a sentence if it waits longer than a moment. Raises StoreError for an unusable store.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        notice: Callable[[str], None] | None = None,
        patience: float | None = None,
    ) -> None:
        self.folder = folder or settings.data_dir()
        self._path = self.folder / "mlbench.sqlite"
        self._notice = notice
        self._patience = settings.store_patience() if patience is None else patience
        self._moment = min(NOTICE_SECONDS, self._patience)
        can_write = all(os.access(path, os.W_OK) for path in (self.folder, self._path) if path.exists())
        self.is_read_only = self._path.exists() and not can_write
        try:
            if self.is_read_only:
                # On a disk that is mounted read-only, or of somebody else.
                self._db = self._connect(f"file:{quote(str(self._path))}?mode=ro")
            else:
                self._db = self._connect(f"file:{quote(str(self._path))}")
                # A write-ahead log needs memory that all clients share, so it must not be used on a network file system
                # (sqlite.org/wal.html), where home folders of clusters are.
                self._execute("PRAGMA journal_mode=PERSIST")
                self._execute("PRAGMA synchronous=FULL")
            self.require_readable()
            if self._schema_version() < SCHEMA_VERSION:
                self._migrate()
        except sqlite3.Error as error:
            raise self._explain(error) from None

    def _connect(self, address: str) -> sqlite3.Connection:
        return sqlite3.connect(address, uri=True, timeout=self._moment, isolation_level=None)

    def require_writable(self) -> None:
        """Raise StoreError if this user cannot change the store."""
        if self.is_read_only:
            raise self._explain(sqlite3.OperationalError("it can only be read"))

    def require_readable(self) -> None:
        """Raise StoreError if a newer mlbench has written the store, even after it was opened."""
        try:
            found = self._schema_version()
        except sqlite3.Error as error:
            raise self._explain(error) from None
        if found > SCHEMA_VERSION:
            raise StoreError(
                f"The store {self._path} was written by a newer mlbench (schema {found}; this one knows "
                f"{SCHEMA_VERSION}).",
                hint="Upgrade mlbench, or set MLBENCH_HOME to another folder.",
            )

    # --- runs ---------------------------------------------------------------------------------------------------

    def record_run(self, spec: RunSpec, *, run_id: str | None = None, created: str | None = None) -> Run:
        """Record a run before it is handed to its engine. Raises UsageError if the name exists."""
        run_id = run_id or os.urandom(6).hex()
        run = Run(run_id, spec, self.folder / "runs" / run_id, created or now())
        with self._transaction() as db:
            _insert_run(db, run, RunState.SUBMITTED)
        return run

    def record_experiment(self, experiment: Experiment, runs: Sequence[Run]) -> None:
        """Record an experiment with its members and new runs in one transaction.

        An experiment with the same id is replaced. Raises UsageError if a run or experiment with one of the names
        exists.
        """
        with self._transaction() as db:
            taken = db.execute("SELECT id FROM experiments WHERE name = ?", (experiment.name,)).fetchone()
            if taken is not None and taken[0] != experiment.id:  # since this client looked for the name
                raise UsageError(
                    f'Another process has just started an experiment "{experiment.name}".',
                    hint=f"mlbench wait {experiment.name}, or choose another name",
                )
            for run in runs:
                _insert_run(db, run, RunState.QUEUED)
            if db.execute("SELECT 1 FROM runs WHERE name = ?", (experiment.name,)).fetchone():
                raise _name_taken("run", experiment.name)
            values = (experiment.id, experiment.name, experiment.created, _dump(experiment.request))
            db.execute(
                "INSERT OR REPLACE INTO experiments VALUES (?,?,?,?,?,?)",
                (*values, experiment.require_goal, experiment.parallel),
            )
            db.execute("DELETE FROM members WHERE experiment = ?", (experiment.id,))
            db.executemany(
                "INSERT INTO members VALUES (?,?,?,?,?)",
                [(experiment.id, item.index, item.run_id, item.content_hash, _dump(item.point))
                 for item in experiment.members],
            )  # fmt: skip

    def find_experiment(self, name: str) -> Experiment | None:
        """The experiment with this name; None if there is none."""
        found = self._experiments("WHERE name = ?", name) if name.isascii() else []
        return found[0] if found else None

    def find_experiment_of(self, run: Run) -> Experiment | None:
        """The experiment that contains the run; None if there is none."""
        found = self._experiments("WHERE id = (SELECT experiment FROM members WHERE run = ?)", run.id)
        return found[0] if found else None

    def experiments_of(self, run_ids: Sequence[str]) -> list[Experiment]:
        """The distinct experiments of these runs, oldest first."""
        ids: dict[str, None] = {}
        for start in range(0, len(run_ids), MAX_NAMED):
            some = run_ids[start : start + MAX_NAMED]
            marks = ",".join("?" * len(some))
            ids |= {
                row[0]: None for row in self._query(f"SELECT experiment FROM members WHERE run IN ({marks})", *some)
            }
        found = (each for name in ids for each in self._experiments("WHERE id = ?", name))
        return sorted(found, key=lambda each: each.created)

    def experiments(self) -> list[Experiment]:
        """All experiments, oldest first."""
        return self._experiments("ORDER BY created, rowid")

    def newest_experiments(self, count: int) -> list[Experiment]:
        """The newest `count` experiments, oldest first."""
        return self._experiments("ORDER BY created DESC, rowid DESC LIMIT ?", count)[::-1]

    def _experiments(self, clause: str, *values: str | int) -> list[Experiment]:
        rows = self._query(f"SELECT * FROM experiments {clause}", *values)
        members: dict[str, list[Member]] = {}
        few = [row["id"] for row in rows] if len(rows) <= MAX_NAMED else []
        selected = f"WHERE experiment IN ({','.join('?' * len(few))})" if few else ""
        for row in self._query(f"SELECT * FROM members {selected} ORDER BY number", *few) if rows else []:
            member = Member(row["number"], row["run"], row["content_hash"], json.loads(row["point"]))
            members.setdefault(row["experiment"], []).append(member)
        return [
            Experiment(
                row["id"], row["name"], row["created"], json.loads(row["request"]),
                tuple(members.get(row["id"], ())), bool(row["require_goal"]), row["parallel"],
            )
            for row in rows
        ]  # fmt: skip

    def run(self, name: str, *, readable: bool = True) -> RunRow:
        """The run with this name. Raises NotFoundError with the nearest name and, if `readable`, UsageError for a run
        with a spec that this mlbench cannot read.
        """
        # Names are DNS labels; SQLite would reject undecodable bytes of a command line.
        rows = self._query("SELECT * FROM runs WHERE name = ?", name) if name.isascii() else []
        if not rows:
            near = did_you_mean(name, self.near_names(name))
            raise NotFoundError(f'There is no run "{name}".{near}', hint="mlbench status")
        row = self._run_row(rows[0])
        if readable and row.problem:
            raise UsageError(
                f'The run "{name}" cannot be read: {row.problem}', hint=f"Upgrade mlbench, or: mlbench delete {name}"
            )
        return row

    def near_names(self, name: str) -> list[str]:
        """Names to suggest: runs that start like `name`, the most similar first, and the newest runs.

        At most 2 x MAX_NEAR: comparing with 50,000 names would take seconds.
        """
        found: dict[str, None] = {}
        for length in range(len(name) if name.isascii() else 0, 0, -1):
            rows = self._query(
                "SELECT name FROM runs WHERE name >= ? AND name < ? LIMIT ?",
                name[:length], name[:length] + "\x7f", MAX_NEAR,
            )  # fmt: skip
            found |= dict.fromkeys(row["name"] for row in rows)
            if len(found) >= MAX_NEAR:
                break
        newest = self._query("SELECT name FROM runs ORDER BY rowid DESC LIMIT ?", MAX_NEAR)
        return [*list(found)[:MAX_NEAR], *(row["name"] for row in newest)]

    def run_family(self, name: str) -> list[RunRow]:
        """The runs whose names start with `name` and a hyphen, oldest first."""
        if not name.isascii():
            return []
        rows = self._query(
            "SELECT * FROM runs WHERE name > ? AND name < ? ORDER BY created, rowid", f"{name}-", f"{name}."
        )
        return [self._run_row(row) for row in rows]

    def find_run(self, run_id: str) -> RunRow | None:
        """The run with this id; None if it was deleted."""
        rows = self._query("SELECT * FROM runs WHERE id = ?", run_id)
        return self._run_row(rows[0]) if rows else None

    def members(self, experiment: Experiment) -> list[RunRow]:
        """The runs of an experiment, in its order."""
        found = (self.find_run(member.run_id) for member in experiment.members)
        return [row for row in found if row is not None]

    def runs(self) -> list[RunRow]:
        """All runs, oldest first."""
        return [self._run_row(row) for row in self._query("SELECT * FROM runs ORDER BY created, rowid")]

    def iterate_runs(
        self, *, contains: str = "", words: Collection[str] = (), tasks: Collection[str] = (), live: bool = False
    ) -> Iterator[RunRow]:
        """Iterate over runs, newest first, reading the store in pages.

        `contains` is a part of the name; `words` are recorded states or outcomes and `tasks` names of tasks, any of
        which matches. With `live`, `words` filters only runs that are recorded as finished.
        """
        if not contains.isascii():
            return  # names are DNS labels
        before: tuple[str, int] | None = None
        page = 64
        while rows := self._query_page(before, page, contains, words, tasks, live):
            yield from map(self._run_row, rows)
            before = rows[-1]["created"], rows[-1]["number"]
            page = 1024

    def _query_page(
        self,
        before: tuple[str, int] | None,
        size: int,
        contains: str,
        words: Collection[str],
        tasks: Collection[str],
        live: bool,
    ) -> list[sqlite3.Row]:
        """The newest `size` runs that are older than `before` (time of creation and row number)."""
        marks = ",".join("?" * len(words))
        unfinished = f"OR state <> '{RunState.FINISHED}'" if live else ""
        task = f"{TASK_OF_SPEC} IN ({','.join('?' * len(tasks))})"
        conditions: list[tuple[str, tuple[str | int, ...]]] = [
            *([("(created, rowid) < (?, ?)", before)] if before else []),
            *([("instr(name, ?) > 0", (contains,))] if contains else []),
            *([(f"(state IN ({marks}) OR outcome IN ({marks}) {unfinished})", (*words, *words))] if words else []),
            *([(task, tuple(tasks))] if tasks else []),
        ]
        selected = "WHERE " + " AND ".join(text for text, _ in conditions) if conditions else ""
        newest = f"SELECT rowid FROM runs {selected} ORDER BY created DESC, rowid DESC LIMIT {size}"
        statement = "SELECT rowid AS number, * FROM runs WHERE rowid IN ({}) ORDER BY created DESC, rowid DESC"
        return self._query(statement.format(newest), *(value for _, values in conditions for value in values))

    def count_runs(self) -> int:
        """The number of recorded runs."""
        return int(self._query("SELECT COUNT(*) AS count FROM runs")[0]["count"])

    def advance(self, run: Run, state: RunState, outcome: Outcome | None = None) -> None:
        """Record that a run has reached `state` and, once it is known, its outcome.

        A run never goes back: what a slower client observed before has no effect.
        """
        earlier = [str(each) for each in RunState][: list(RunState).index(state) + 1]
        with self._transaction() as db:
            db.execute(
                f"UPDATE runs SET state = ?, outcome = ? WHERE id = ? AND state IN ({', '.join('?' * len(earlier))})",
                (state, outcome, run.id, *earlier),
            )

    def forget_run(self, run: Run) -> list[str]:
        """Delete a run's record, and its experiment's if it was the last member. Returns ids of deleted experiments."""
        with self._transaction() as db:
            db.execute("DELETE FROM runs WHERE id = ?", (run.id,))
            db.execute("DELETE FROM members WHERE run = ?", (run.id,))
            empty = "FROM experiments WHERE id NOT IN (SELECT experiment FROM members)"
            found = [row[0] for row in db.execute(f"SELECT id {empty}")]
            db.execute(f"DELETE {empty}")
            return found

    # --- clusters -----------------------------------------------------------------------------------------------

    def record_cluster(self, cluster: Cluster, keep: Sequence[str] = ()) -> Cluster:
        """Insert or replace a cluster's record by its identity; `created` is set once.

        Recorded details with a key in `keep` are not replaced.
        """
        key = cluster.identity
        with self._transaction() as db:
            known = self.find_cluster(key) if keep else None
            kept = {name: known.details[name] for name in keep if name in known.details} if known is not None else {}
            values = (*_key(key), cluster.created or now(), cluster.state, _dump({**cluster.details, **kept}))
            if key.account:  # records of older versions have no account
                db.execute(
                    "UPDATE OR IGNORE clusters SET account = ? "
                    "WHERE provider = ? AND account = '' AND location = ? AND name = ?",
                    (key.account, key.provider, key.location, key.name),
                )
            db.execute(
                "INSERT INTO clusters VALUES (?,?,?,?,?,?,?) ON CONFLICT(provider, account, location, name) "
                "DO UPDATE SET state = excluded.state, details = excluded.details",
                values,
            )
        recorded = self.find_cluster(key)
        assert recorded is not None
        return recorded

    def record_images(self, identity: ClusterIdentity, digests: Mapping[str, str]) -> bool:
        """Add image digests by IMAGE:VERSION to a cluster's record. False if there is no record."""
        with self._transaction() as db:
            known = self.find_cluster(identity)
            if known is None:
                return False
            details = {**known.details, "images": {**(known.details.get("images") or {}), **digests}}
            db.execute(
                "UPDATE clusters SET details = ? WHERE provider = ? AND account = ? AND location = ? AND name = ?",
                (_dump(details), *_key(known.identity)),
            )
        return True

    def find_cluster(self, identity: ClusterIdentity) -> Cluster | None:
        """The record of this cluster; None if there is none. An unknown account matches every account."""
        known = [cluster for cluster in self.clusters() if cluster.identity.matches(identity)]
        return next((cluster for cluster in known if cluster.identity == identity), known[0] if known else None)

    def cluster(self, reference: str) -> Cluster:
        """The cluster NAME or NAME@LOCATION; `local` always exists.

        Raises NotFoundError with the nearest name, UsageError if the name is ambiguous.
        """
        name, _, location = reference.partition("@")
        clusters = self.clusters()
        found = [item for item in clusters if item.name == name and location in ("", item.location)]
        # Usable clusters take precedence over records of clusters that are being deleted.
        found = [item for item in found if item.state != "deleting"] or found
        if len(found) > 1:
            listed = ", ".join(f"{name}@{item.location or item.provider}" for item in found)
            raise UsageError(
                f'{len(found)} clusters are called "{name}": {listed}.', hint="Name one with its location."
            )
        if not found:
            near = did_you_mean(reference, [item.name for item in clusters])
            raise NotFoundError(f'There is no cluster "{reference}".{near}', hint="mlbench list-clusters")
        return found[0]

    def clusters(self) -> list[Cluster]:
        """All known clusters, `local` first, then oldest first."""
        rows = self._query("SELECT * FROM clusters ORDER BY created, rowid")
        return [LOCAL] + [
            Cluster(
                row["name"], row["provider"], row["state"], row["created"], json.loads(row["details"]), row["account"],
                row["location"],
            )
            for row in rows
        ]  # fmt: skip

    def forget_cluster(self, cluster: Cluster) -> None:
        """Delete a cluster's record; if it was the current cluster, `local` becomes current."""
        chosen = self._chosen_identity()
        with self._transaction() as db:
            db.execute(
                "DELETE FROM clusters WHERE provider = ? AND account = ? AND location = ? AND name = ?",
                _key(cluster.identity),
            )
            if chosen is not None and chosen.matches(cluster.identity):
                db.execute("DELETE FROM choices WHERE key = 'cluster'")

    @property
    def current_cluster(self) -> Cluster:
        """The cluster that commands use by default. Raises NotFoundError if its record was deleted."""
        identity = self._chosen_identity()
        if identity is None or identity == LOCAL.identity:
            return LOCAL
        return self.find_cluster(identity) or self.cluster(identity.name)

    def choose_cluster(self, cluster: Cluster) -> None:
        """Make `cluster` the one that commands use by default."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO choices VALUES ('cluster', ?)", (_dump(_key(cluster.identity)),))

    def _chosen_identity(self) -> ClusterIdentity | None:
        rows = self._query("SELECT value FROM choices WHERE key = 'cluster'")
        return ClusterIdentity(*json.loads(rows[0]["value"])) if rows else None

    # --- journal ------------------------------------------------------------------------------------------------

    def journal(self, cluster: Cluster, kind: str, name: str, action: str, **details: Any) -> None:
        """Durably record a request to a cloud before it is made, or its result."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO journal (cluster, kind, name, action, time, details, provider, account, location) "
                "VALUES (?,?,?,?,?,?,?,?,?)",
                (
                    *(cluster.name, kind, name, action, datetime.now(UTC).timestamp(), _dump(details)),
                    *(cluster.provider, cluster.account, cluster.location),
                ),
            )

    def journal_of(self, name: str) -> list[JournalEntry]:
        """The requests for all clusters with this name, oldest first."""
        rows = self._query("SELECT * FROM journal WHERE cluster = ? ORDER BY id", name)
        return [
            JournalEntry(
                ClusterIdentity(row["provider"], row["account"], row["location"], row["cluster"]),
                *(row["kind"], row["name"], row["action"], row["time"], json.loads(row["details"])),
            )
            for row in rows
        ]

    def find_deleted_cluster(self, name: str) -> Cluster | None:
        """The last record of the deleted cluster of that name, with the time of its deletion; None without one."""
        for entry in reversed(self.journal_of(name)):
            if entry.kind == CLUSTER and entry.action == REMOVED:
                kept, identity = entry.details, entry.cluster
                details = {**kept["details"], "removed": timestamp(entry.time)}
                return Cluster(
                    *(name, kept["provider"], REMOVED, kept["created"], details), identity.account, identity.location
                )
        return None

    def last_record(self, reference: str) -> Cluster:
        """The record of a cluster, the last one if it was deleted. Raises NotFoundError with the nearest name."""
        try:
            return self.cluster(reference)
        except NotFoundError:
            if (deleted := self.find_deleted_cluster(reference)) is not None:
                return deleted
            raise

    # --- plumbing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _schema_version(self) -> int:
        return int(self._execute("PRAGMA user_version").fetchone()[0])

    def _execute(self, statement: str, values: Sequence[str | int] = ()) -> sqlite3.Cursor:
        """Execute a statement, waiting up to `patience` seconds while another process has the store locked."""
        try:
            return self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or self._moment >= self._patience:
                raise
        if self._notice is not None:
            self._notice(
                f"Waiting for the store {self._path}, which another process has locked; at most {self._patience:g} s."
            )
        self._set_timeout(self._patience - self._moment)
        try:
            return self._db.execute(statement, values)
        finally:
            self._set_timeout(self._moment)

    def _set_timeout(self, seconds: float) -> None:
        self._db.execute(f"PRAGMA busy_timeout={round(seconds * 1000)}")

    def _migrate(self) -> None:
        """Migrate the store to this version's schema in one transaction."""
        with self._transaction() as db:
            for step in MIGRATIONS[self._schema_version() :]:  # another process may have migrated it meanwhile
                step(db)
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _query(self, statement: str, *values: str | int) -> list[sqlite3.Row]:
        try:
            cursor = self._execute(statement, values)
            cursor.row_factory = sqlite3.Row
            return cursor.fetchall()
        except sqlite3.Error as error:
            raise self._explain(error) from None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._execute("COMMIT")  # waits for those that read
            except BaseException:
                if self._db.in_transaction:  # SQLite itself has ended it if the disk is full
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise self._explain(error) from None

    def _explain(self, error: sqlite3.Error) -> MlbenchError:
        if _is_busy(error):
            return StoreLockedError(
                f"The store {self._path} is locked: another process has not released it within {self._patience:g} s.",
                hint=f"Wait for that process, or end it (lsof {self._path}); then repeat the command. "
                "MLBENCH_STORE_PATIENCE=SECONDS waits longer.",
            )
        if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return StoreError(
                f"The store {self._path} is damaged: {error}.",
                hint=f"Move {self._path}* to another folder, then record sealed runs again: mlbench status --refresh",
            )
        what = f"The store {self._path} cannot be used: {str(error).rstrip('.')}."
        if isinstance(error, sqlite3.ProgrammingError):
            return StoreError(what, hint="Make a Client in each thread, and use it before it is closed.")
        return StoreError(
            what,
            hint="Free some space, fix its permissions, or set MLBENCH_HOME to another folder.",
        )

    def _run_row(self, row: sqlite3.Row) -> RunRow:
        spec, problem = _parse_spec(row)
        folder = self.folder / "runs" / row["id"]  # the store may have moved since the row was written
        run = Run(row["id"], spec, folder, row["created"])
        state = _STATES.get(row["state"], RunState.SUBMITTED)
        outcome = _OUTCOMES.get(row["outcome"])
        return RunRow(run, state, outcome, problem, self._queue_of(run) if state is RunState.QUEUED else None)

    def _queue_of(self, run: Run) -> ExperimentName | None:
        rows = self._query("SELECT id, name FROM experiments WHERE id = (SELECT experiment FROM members WHERE run = ?)",
                           run.id)  # fmt: skip
        return ExperimentName(rows[0]["id"], rows[0]["name"]) if rows else None


def _parse_spec(row: sqlite3.Row) -> tuple[RunSpec, str | None]:
    """The spec in a row; if it is unreadable, a spec from the other columns, and the reason."""
    try:
        return RunSpec.from_dict(json.loads(row["spec"])), None
    except UsageError as error:
        problem = error.message
    except ValueError as error:
        problem = f"its spec is not JSON: {error}"
    return RunSpec(row["name"], row["cluster"], "unknown", "unknown", "unknown", ("unknown",), "unknown", 1), problem


def _key(identity: ClusterIdentity) -> tuple[str, str, str, str]:
    return identity.provider, identity.account, identity.location, identity.name


def _insert_run(db: sqlite3.Connection, run: Run, state: RunState) -> None:
    if db.execute("SELECT 1 FROM experiments WHERE name = ?", (run.name,)).fetchone():
        raise _name_taken("experiment", run.name)
    try:
        db.execute(
            "INSERT INTO runs VALUES (?,?,?,?,?,?,?,?)",
            (
                *(run.id, run.name, run.spec.cluster, run.created, state, None),
                *(_dump(run.spec.to_dict()), str(run.folder)),
            ),
        )
    except sqlite3.IntegrityError:
        raise _name_taken("run", run.name) from None


def _name_taken(kind: str, name: str) -> UsageError:
    return UsageError(
        f'There is already {"a run" if kind == "run" else "an experiment"} "{name}".',
        hint=f"Choose another name, or: mlbench delete {name}",
    )


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _is_busy(error: sqlite3.Error) -> bool:
    """Whether the error means that another connection holds the lock."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
