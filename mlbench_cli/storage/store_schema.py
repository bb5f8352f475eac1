"""The schema of the store, and its migrations."""

import json
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.spec import RunSpec


def _create_tables(db: sqlite3.Connection) -> None:
    db.execute(
        "CREATE TABLE clusters (name TEXT PRIMARY KEY, provider TEXT NOT NULL, created TEXT NOT NULL, "
        "state TEXT NOT NULL, details TEXT NOT NULL)"
    )
    db.execute(
        "CREATE TABLE journal (id INTEGER PRIMARY KEY, cluster TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, "
        "action TEXT NOT NULL, time REAL NOT NULL, details TEXT NOT NULL)"
    )
    db.execute(
        "CREATE TABLE runs (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, cluster TEXT NOT NULL, "
        "created TEXT NOT NULL, state TEXT NOT NULL, outcome TEXT, spec TEXT NOT NULL, folder TEXT NOT NULL)"
    )
    db.execute("CREATE TABLE choices (key TEXT PRIMARY KEY, value TEXT NOT NULL)")


def _add_experiments(db: sqlite3.Connection) -> None:
    db.execute(
        "CREATE TABLE experiments (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, created TEXT NOT NULL, "
        "request TEXT NOT NULL, require_goal INTEGER NOT NULL, parallel INTEGER NOT NULL)"
    )
    db.execute(
        "CREATE TABLE members (experiment TEXT NOT NULL, number INTEGER NOT NULL, run TEXT NOT NULL UNIQUE, "
        "content_hash TEXT NOT NULL, point TEXT NOT NULL, PRIMARY KEY (experiment, number))"
    )


def _identify_clusters(db: sqlite3.Connection) -> None:
    """Key clusters by provider, account, location and name instead of by name alone, also in the journal."""
    rows = db.execute("SELECT name, provider, created, state, details FROM clusters ORDER BY created, rowid").fetchall()
    db.execute("DROP TABLE clusters")
    db.execute(
        "CREATE TABLE clusters (provider TEXT NOT NULL, account TEXT NOT NULL, location TEXT NOT NULL, "
        "name TEXT NOT NULL, created TEXT NOT NULL, state TEXT NOT NULL, details TEXT NOT NULL, "
        "PRIMARY KEY (provider, account, location, name))"
    )
    identities = {}
    for name, provider, created, state, details in rows:
        account, location = _place_in_details(provider, json.loads(details))
        identities[name] = [provider, account, location, name]
        db.execute("INSERT INTO clusters VALUES (?,?,?,?,?,?,?)", (*identities[name], created, state, details))
    for column in ("provider", "account", "location"):
        db.execute(f"ALTER TABLE journal ADD COLUMN {column} TEXT NOT NULL DEFAULT ''")
    for identity in identities.values():
        db.execute("UPDATE journal SET provider = ?, account = ?, location = ? WHERE cluster = ?", identity)
    for (chosen,) in db.execute("SELECT value FROM choices WHERE key = 'cluster'").fetchall():
        identity = identities.get(chosen, ["local", "", "", "local"])
        db.execute("UPDATE choices SET value = ? WHERE key = 'cluster'", (json.dumps(identity, sort_keys=True),))


def _index_runs_by_time(db: sqlite3.Connection) -> None:
    """Index runs by time: every page shows the newest runs first, and would otherwise sort all of them."""
    db.execute("CREATE INDEX runs_by_time ON runs (created)")


# The task in a run's spec; NULL for a damaged spec, or one in a newer format.
TASK_OF_SPEC = "CASE WHEN json_valid(spec) THEN json_extract(spec, '$.task') END"


def _index_runs_by_task(db: sqlite3.Connection) -> None:
    """Index runs by task: a search would otherwise parse every spec."""
    db.execute(f"CREATE INDEX runs_by_task ON runs ({TASK_OF_SPEC})")


def _tell_queued_runs(db: sqlite3.Connection) -> None:
    """Runs that wait in a queue had a note in their folder; a row without one may be known to its engine."""
    for run_id, folder in db.execute("SELECT id, folder FROM runs WHERE state = 'created'").fetchall():
        state = "queued" if Path(folder, ".state", "queued.json").is_file() else "submitted"
        db.execute("UPDATE runs SET state = ? WHERE id = ?", (state, run_id))


def _give_options_to_engines(db: sqlite3.Connection) -> None:
    """Specs of version 1 had options of Kubernetes on every engine, and the ranks' variables among them."""
    for run_id, text in db.execute("SELECT id, spec FROM runs").fetchall():
        try:
            old = json.loads(text)
            options = old["kubernetes"]
            new = {**old, "spec_version": 2, "env": options.pop("env", {})}
            new["kubernetes"] = options if old["engine"] == "kubernetes" else None
            spec = RunSpec.from_dict(new)
        except (MlbenchError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # shown with the reason why it cannot be read
        text = json.dumps(spec.to_dict(), sort_keys=True)
        db.execute("UPDATE runs SET spec = ? WHERE id = ?", (text, run_id))
        db.execute("UPDATE members SET content_hash = ? WHERE run = ?", (spec.content_hash, run_id))


def _spell_canceled(db: sqlite3.Connection) -> None:
    """The outcome was spelled in two ways, in records and in sentences."""
    db.execute("UPDATE runs SET outcome = 'canceled' WHERE outcome = 'cancelled'")


def _place_in_details(provider: str, details: Mapping[str, Any]) -> tuple[str, str]:
    """Account and location of a cluster from the details of its record."""
    if provider == "eks":
        return "", str(details.get("region") or "")
    if provider == "gke":
        return str(details.get("project") or ""), str(details.get("location") or "")
    return "", ""


# Step N migrates a store from schema N to schema N + 1. New stores take all steps, so all stores of a version have the
# same schema. Never change a released step; append another one.
MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    *(_create_tables, _add_experiments, _identify_clusters),
    _index_runs_by_time,
    _index_runs_by_task,
    _tell_queued_runs,
    _give_options_to_engines,
    _spell_canceled,
)
SCHEMA_VERSION = len(MIGRATIONS)
