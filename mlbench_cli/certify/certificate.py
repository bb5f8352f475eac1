"""A certificate for people: files beside its archive, the commands that it suggests, and one page."""

import errno
import json
import math
import os
import shlex
import shutil
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbench_cli.certify.words import State
from mlbench_cli.errors import CannotTellError, NeverStartedError, TaskFailedError, UsageError, naming_file_on_os_error
from mlbench_cli.results.archive.files import Archive, pack
from mlbench_cli.results.archive.sign import sign
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.results.receipts import archive_digest
from mlbench_cli.results.report.render import make_environment, render_page
from mlbench_cli.storage import run_folder
from mlbench_cli.util.csv_text import format_csv
from mlbench_cli.util.files import write_atomically
from mlbench_cli.util.text import clean_values, counted, list_some, shorten
from task_images.certify.rules import ERROR, LEAST_DIP, PEERS, TESTS, need

ARCHIVE = "archive.zip"
_LINKS = ("recheck", "earlier", "expect")  # parameters that say what a certificate belongs to
SHOWN_NODES = 64  # columns of the page's table; nodes.csv has all


@dataclass(frozen=True)
class Certificate:
    """The certificate in a verified archive."""

    document: Mapping[str, Any]
    run: Mapping[str, Any]
    digest: str  # of the archive
    places: Collection[str] = ()  # names of nodes; others are names of workers whose node is not known
    obstacles: tuple[str, ...] = ()  # what the run itself says of its failure

    @property
    def rechecked(self) -> Mapping[str, Any] | None:
        """The node that was measured again after an earlier certificate, if this certificate is about one."""
        asked = self.run["spec"]["parameters"].get("recheck")
        return next((node for node in self.document["nodes"] if node["node"] == asked), None)

    @property
    def bad(self) -> list[Mapping[str, Any]]:
        """The nodes to return; none if the evidence contradicts itself."""
        if self.document["contradictions"]:
            return []
        return [node for node in self.document["nodes"] if State(node["state"]).is_bad]

    @property
    def exit_code(self) -> int:
        """0: accepted; 7: nodes are named, or the cluster is rejected; 9: cannot tell; 6: no node could start."""
        if not self.document["scope"]["answered"]:
            return NeverStartedError.exit_code
        if self.bad or self.document["verdict"] == "rejected":
            return TaskFailedError.exit_code
        if self.rechecked is not None and not self.document["is_partial"]:
            return 0 if self.rechecked["state"] == "ok" else CannotTellError.exit_code
        return 0 if self.document["verdict"] == "accepted" else CannotTellError.exit_code

    @property
    def headline(self) -> str:
        """The verdict as a sentence."""
        word = self.document["verdict"].replace("_", " ").capitalize()
        partial = "Partial. " if self.document["is_partial"] else ""
        if self.rechecked is not None:
            return f"{partial}{self.rechecked['node']} is {self.rechecked['state'].replace('_', ' ')}"
        if self.document["verdict"] == "accepted_without":
            return f"{word} {len(self.bad)} of {counted(len(self.document['nodes']), self.unit)}"
        return f"{partial}{word}: {self.document['reason']}"

    @property
    def level(self) -> str:
        """The level, with the parameters that differ from it."""
        spec, preset = self.run["spec"], (self.run["task"] or {}).get("preset", {})
        changes = [
            f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in spec["parameters"].items()
            if name not in _LINKS and value != preset.get(name)
        ]
        word = "quick" if spec["preset"] == "spec" else str(spec["preset"])
        return f"{word}, but {'; '.join(changes)}" if changes else word

    @property
    def unit(self) -> str:
        """What stands for a node."""
        return "worker" if self.document["scope"]["shares_machine"] else "node"

    @property
    def sureness(self) -> str:
        """The error rate, and what the run would have found."""
        method, fleet = self.document["method"], self.document["fleet"]
        least = [facts for facts in fleet.values() if facts["smallest_shortfall"] is not None]
        parts = []
        if self.document["contradictions"]:
            return "The evidence contradicts itself, and proves nothing."
        if not fleet:
            return f"No {self.unit} was compared with others."
        if method["least_dip_seconds"] >= LEAST_DIP:
            parts.append(
                f"A cluster without faults gets a wrong name in at most {100 * method['error']:g} of 100 runs, if a "
                f"disturbance, however old, goes on for {method['least_dip_seconds']:g} s on average or less."
            )
        else:
            parts.append("The confirmation was hurried, so no error rate is stated.")
        if least:
            named = ", ".join(f"{100 * facts['smallest_shortfall']:.1f} % ({facts['title']})" for facts in least)
            parts.append(f"Shortfalls of one {self.unit} that would have been found in 95 of 100 runs: {named}.")
        return " ".join(parts)

    def commands(self) -> list[str]:
        """Commands that take the bad nodes out. They are printed, never run."""
        engine, found = self.run["spec"]["engine"], []
        bad = [node for node in self.bad if node["node"] in self.places]
        names = [node["node"] for node in bad]
        if not names or self.unit == "worker":
            return []
        for node in bad:
            name, reason = shlex.quote(node["node"]), (node["reasons"] or ["no_answer"])[0]
            if engine == "kubernetes":
                found += [f"kubectl cordon {name}", f"kubectl label node {name} mlbench.io/suspect={reason}"]
            elif engine == "slurm":
                text = shlex.quote(f"mlbench:{reason}:{self.digest[:12]}")
                found.append(f"scontrol update NodeName={name} State=DRAIN Reason={text}")
        if engine == "slurm":
            found.append(f"srun --exclude={shlex.quote(','.join(names))} ...")
        if engine == "hosts":
            found += [f"# leave {name} out of the hosts file, then: mlbench attach-hosts" for name in names]
        return found

    def ticket(self) -> str:
        """A text for the seller of the bad nodes."""
        lines = [f"Acceptance test of {self.run['spec']['cluster']} on {self.run['created']}: {self.headline}", ""]
        for found in self.document["findings"]:
            if found["state"] in ("missing", "failed", "slow"):
                lines.append(f"- {', '.join(found['nodes'])}: {found['reason']}: {found['summary']}")
        for node in self.bad:
            if serials := node.get("serials"):
                lines.append(f"- {node['node']}: serial numbers of its GPUs: {', '.join(serials)}")
        lines += ["", f"Evidence: archive with the SHA-256 {self.digest}; check it with: mlbench verify {ARCHIVE}", ""]
        return "\n".join(lines)


def read_certificate(path: Path) -> Certificate:
    """The certificate in an archive. Raises UsageError for one of another task, DamagedArchive, UnprovenArchive."""
    with open_verified(path) as archive:
        if run_folder.CERTIFICATE not in archive.names:
            raise UsageError(
                f"{archive.path} is the archive of a run of {archive.result['task']}, and has no certificate.",
                hint="mlbench certify CLUSTER writes one.",
            )
        return _read(archive)


def _read(archive: Archive) -> Certificate:
    document = clean_values(archive.document(run_folder.CERTIFICATE))  # names of nodes become lines and commands
    document.pop("schema_version", None)
    obstacles = tuple(str(found["summary"]) for found in archive.findings)
    places = {str(worker["node"]) for worker in archive.result["worker_states"] if worker["node"] is not None}
    return Certificate(document, archive.run, archive_digest(archive), places, obstacles)


def compare(old: Certificate, new: Certificate) -> list[dict[str, Any]]:
    """What has changed for each node since an earlier certificate of the same hardware; after a recheck, for those that
    were measured again."""
    before, after = ({node["node"]: State(node["state"]) for node in one.document["nodes"]} for one in (old, new))
    had, has = ({node["node"]: node.get("serials") for node in one.document["nodes"]} for one in (old, new))
    rows, order = [], list(State)
    for name in sorted(after.keys() if new.rechecked is not None else before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was is None or now is None:
            change = "new" if was is None else "gone"
        elif had[name] and has[name] and had[name] != has[name]:
            change = "replaced"
        elif was is now:
            continue
        else:
            change = "worse" if order.index(now) < order.index(was) else "recovered"
        rows.append({"node": name, "change": change, "before": was, "now": now})
    return rows


def compare_fleets(old: Certificate, new: Certificate) -> list[dict[str, Any]]:
    """Tests in which the nodes of both certificates are slower than before, or faster, by more than the margin of a
    watch: a sign test over nodes, with an error of 2 % for all tests together. Fewer than ten nodes prove nothing. What
    all nodes of a certificate have in common hides in comparisons of its nodes with each other."""
    tests = [test for test in TESTS if test in old.document["fleet"] and test in new.document["fleet"]]
    found = []
    for test in tests:
        before, now = (_rates(one, test) for one in (old, new))
        shared = sorted(before.keys() & now.keys())
        margin = math.log1p(-TESTS[test].warn)
        moved = [math.log(now[name] / before[name]) for name in shared]
        for change, count in (
            ("slower", sum(each < margin for each in moved)),
            ("faster", sum(each > -margin for each in moved)),
        ):
            if shared and count >= need(len(shared), ERROR / (2 * len(tests))):
                found.append(
                    {
                        "test": test,
                        "change": change,
                        "share": round(abs(math.expm1(statistics.median(moved))), 6),
                        "nodes": count,
                        "of": len(shared),
                    }
                )
    return found


def describe_changes(nodes: Sequence[Mapping[str, Any]], fleets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences for what `compare` and `compare_fleets` found."""
    told = [f"{row['node']}: {row['change']} ({row['before'] or 'absent'} → {row['now'] or 'absent'})" for row in nodes]
    for row in fleets:
        text = f"{TESTS[row['test']].title}: {100 * row['share']:.1f} % {row['change']} than before"
        told.append(f"{text} ({row['nodes']} of {row['of']} nodes by more than the margin)")
    return told


def _rates(certificate: Certificate, test: str) -> dict[str, float]:
    """Node -> its rate in a test, for those that are not to be returned."""
    median = certificate.document["fleet"][test]["median"]
    return {
        node["node"]: median * (1 + node["tests"][test])
        for node in certificate.document["nodes"]
        if test in node["tests"] and node["tests"][test] > -1 and not State(node["state"]).is_bad
    }


def choose_peers(earlier: Certificate, node: str) -> tuple[str, ...]:
    """Healthy nodes to measure beside `node` in a recheck. Raises UsageError if `node` is not in the certificate, or
    too few healthy ones are."""
    if earlier.run["spec"]["engine"] == "local":
        raise UsageError(
            "The earlier certificate is of workers on this machine: none of them can be measured again.",
            hint="mlbench certify local measures new ones.",
        )
    nodes = earlier.document["nodes"]
    if node not in (names := [item["node"] for item in nodes]):
        raise UsageError(f"The earlier certificate has no node {shorten(node)}.", hint=f"It has {list_some(names, 8)}.")
    healthy = [item["node"] for item in nodes if item["state"] == "ok" and item["node"] != node]
    if len(healthy) < PEERS:
        raise UsageError(
            f"{len(healthy)} nodes of the earlier certificate are ok, and {PEERS} are needed beside {shorten(node)}.",
            hint=f"mlbench certify {earlier.run['spec']['cluster']} measures all nodes.",
        )
    return tuple(healthy[:PEERS])


def find_other_hardware(old: Certificate, new: Certificate) -> str | None:
    """In which of processor, memory or devices the fleets differ."""
    was, now = old.document["hardware"], new.document["hardware"]
    keys = (key for key in sorted({*was, *now}) if was.get(key) != now.get(key))
    return next((f"{key} was {was.get(key)} and is {now.get(key)}" for key in keys), None)


def check_folder(folder: Path) -> None:
    """Raise MlbenchError if a certificate cannot be written into `folder`: before hours are spent on it."""
    with naming_file_on_os_error(folder, "written"):
        place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{place} is no folder")
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, f"no permission to write to {place}")


def write_files(
    certificate: Certificate, source: Path, folder: Path, key: Path | None, earlier: Certificate | None = None
) -> list[str]:
    """Write the certificate's files and its signed archive into `folder`. Returns what has changed since `earlier`."""
    changes = [] if earlier is None else compare(earlier, certificate)
    fleets = [] if earlier is None else compare_fleets(earlier, certificate)
    told = describe_changes(changes, fleets)
    texts = _derive(certificate)
    texts["certificate.html"] = render(certificate, told, earlier, is_signed=key is not None)
    texts["changes.json"] = None
    if earlier is not None:
        document = {"earlier": earlier.digest, "changes": changes, "fleet": fleets}
        texts["changes.json"] = json.dumps(document, indent=2) + "\n"
    with naming_file_on_os_error(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            pack(source, folder / ARCHIVE)
        elif source.resolve() != (folder / ARCHIVE).resolve():
            shutil.copyfile(source, folder / ARCHIVE)
        for name, text in texts.items():
            if text is None:  # of another certificate in this folder
                (folder / name).unlink(missing_ok=True)
            else:
                write_atomically(folder / name, text.encode())
    if key is not None:
        sign(folder / ARCHIVE, key, force=True)
    return told


def find_edited(archive: Archive) -> list[str]:
    """The files beside the verified archive of a certificate that do not say what it says. The page and changes.json
    also tell what has changed since an earlier certificate, which the archive does not have."""
    edited: list[str] = []
    path = Path(archive.path)
    if path.name == ARCHIVE and run_folder.CERTIFICATE in archive.names:
        for name, text in _derive(_read(archive)).items():
            with suppress(FileNotFoundError):  # somebody got only some of the files
                if (path.parent / name).read_bytes() != (text or "").encode():
                    edited.append(name)
    return edited


def _derive(certificate: Certificate) -> dict[str, str | None]:
    """Name -> text of the files that follow from the archive; None: the certificate has none of that name."""
    document = certificate.document
    good = [node["node"] for node in document["nodes"] if node["state"] in ("ok", "watch")]
    good = [] if document["contradictions"] else good
    return {
        "certificate.json": json.dumps(document, indent=2, ensure_ascii=False) + "\n",
        "findings.jsonl": "".join(json.dumps(found, ensure_ascii=False) + "\n" for found in document["findings"]),
        "nodes.csv": _nodes_csv(document),
        "passing.txt": "".join(f"{name}\n" for name in good),
        "failing.txt": "".join(f"{node['node']}\n" for node in certificate.bad),
        "ticket.txt": certificate.ticket() if certificate.bad else None,
    }


def _nodes_csv(document: Mapping[str, Any]) -> str:
    rows: list[list[object]] = [["node", "state", "reasons", *document["fleet"]]]
    for node in document["nodes"]:
        values = [node["tests"].get(test, "") for test in document["fleet"]]
        rows.append([node["node"], node["state"], " ".join(node["reasons"]), *values])
    return format_csv(rows)


def render(certificate: Certificate, changes: Sequence[str], earlier: Certificate | None, *, is_signed: bool) -> str:
    """The page."""
    own = Path(__file__).parent
    order = list(State)  # worst first
    nodes = sorted(
        certificate.document["nodes"],
        key=lambda node: (order.index(node["state"]), min(node["tests"].values(), default=0.0), node["node"]),
    )
    return render_page(
        make_environment(own),
        "certificate.html.j2",
        (own / "certificate.css").read_text("utf-8"),
        certificate=certificate,
        document=certificate.document,
        nodes=nodes[:SHOWN_NODES],
        nodes_to_watch=sum(node["state"] == "watch" for node in nodes),
        left=max(0, len(nodes) - SHOWN_NODES),
        tones={(node["node"], test): _tone(node, test) for node in nodes for test in certificate.document["fleet"]},
        changes=changes,
        earlier=earlier,
        is_signed=is_signed,
        archive=ARCHIVE,
    )


def _tone(node: Mapping[str, Any], test: str) -> str:
    """The class of a cell: like its peers, over half of the watch margin, watch, or named for this."""
    if test not in node["tests"]:
        return "hx"
    short, margin = -node["tests"][test], TESTS[test]
    if State(node["state"]).is_bad and margin.reason in node["reasons"]:
        return "h3"
    if node["state"] == "watch" and short >= margin.warn:
        return "h2"
    return "h1" if short >= margin.warn / 2 else "h0"
