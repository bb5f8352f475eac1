"""A Slurm of one machine: the commands that mlbench uses, as far as it does (Slurm 23.11's manual pages).

`install` writes the commands into a folder for PATH. Jobs are files beside the slurm.conf that SLURM_CONF names. A
job starts at once; scancel sends TERM to all processes that have the job's SLURM_JOB_ID, and KILL after KILL_WAIT.

`nodes.json` beside slurm.conf lists kinds of nodes: {"names": HOSTLIST, "count": N, "state": as sinfo's %T says it,
"partition": NAME}. An srun outside of a job takes any of them that are not excluded, powered-down ones first, since
Slurm may do so; `woken` then has a line for each kind that it had to start. "gres" is as sinfo's %G says it; a kind
with "wants": OPTION refuses jobs without that option, as plug-ins of sites do. "hidden": its partition is.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KILL_WAIT = 2.0
REFUSED = {
    "account": "Unable to allocate resources: Invalid account or account/partition combination specified",
    "gres": "Unable to allocate resources: Invalid generic resource (gres) specification",
    "constraint": "Unable to allocate resources: Requested node configuration is not available",
}
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol")


def install(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {__file__} {name} "$@"\n')
        path.chmod(0o755)


def jobs_folder() -> Path:
    return Path(os.environ["SLURM_CONF"]).parent


@contextmanager
def controller() -> Iterator[None]:
    """Change jobs one at a time, as slurmctld does."""
    with open(jobs_folder() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_jobs() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(jobs_folder().glob("job-*.json"))]


def write_job(job: dict[str, Any]) -> None:
    path = jobs_folder() / f"job-{job['id']:04}.json"
    path.with_suffix(".part").write_text(json.dumps(job))
    path.with_suffix(".part").rename(path)


def options_of(words: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word[2:].partition("=") for word in words if word.startswith("--"))}


def sbatch(words: list[str]) -> int:
    script = sys.stdin.read()
    if "--test-only" in words:
        return 0
    written = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    options = {**options_of(written), **options_of(words)}
    with controller():
        job = {
            "id": len(read_jobs()) + 1, "name": options["job-name"], "comment": options["comment"], "state": "RUNNING",
            "submitted": time.time(), "started": time.time(), "ended": None,
        }  # fmt: skip
        write_job(job)
    print(job["id"], flush=True)
    if os.fork():
        return 0
    os.setsid()
    (jobs_folder() / f"script-{job['id']}").write_text(script)
    with open(options["output"], "ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = subprocess.run(
        ["bash", str(jobs_folder() / f"script-{job['id']}")],
        cwd=options["chdir"],
        env={**os.environ, "SLURM_JOB_ID": str(job["id"])},
    ).returncode
    with controller():
        (now,) = [found for found in read_jobs() if found["id"] == job["id"]]
        state = "CANCELLED" if now["state"] == "CANCELLED" else "FAILED" if code else "COMPLETED"
        write_job({**now, "state": state, "ended": time.time()})
    return 0


def srun(words: list[str]) -> int:
    if "SLURM_JOB_ID" not in os.environ:
        count = next(number for number, word in enumerate(words) if not word.startswith("--"))
        return allocate(options_of(words[:count]), words[count:])
    cut = words.index("--")
    options, command = options_of(words[:cut]), words[cut + 1 :]
    dead = jobs_folder() / "down"
    down = dead.read_text().split() if dead.exists() else []
    if down and "no-kill" not in options:
        print("srun: error: Node failure", file=sys.stderr)
        return 1
    with open(options["output"], "ab") as output:
        tasks = [
            subprocess.Popen(
                command,
                env={**os.environ, "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"n{node + 1}"},
                stdout=output,
                stderr=output,
            )
            for node in range(int(options["ntasks"]))
            if str(node) not in down
        ]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun forwards signals; here scancel sends them to all
    return max(abs(task.wait()) for task in tasks)


def read_nodes(partition: str | None) -> list[dict[str, Any]]:
    nodes = json.loads((jobs_folder() / "nodes.json").read_text())
    return [node for node in nodes if partition in (None, node["partition"])]


def allocate(options: dict[str, str], command: list[str]) -> int:
    """An srun of its own: one task on each of the nodes that it takes."""
    for node in read_nodes(options.get("partition", "debug")):
        if (wanted_option := node.get("wants")) and wanted_option not in options:
            print(
                f"srun: lua: this partition wants --{wanted_option}\nsrun: error: {REFUSED[wanted_option]}",
                file=sys.stderr,
            )
            return 1
    excluded = set(options.get("exclude", "").split(","))
    known = [node for node in read_nodes(options.get("partition", "debug")) if "taken" not in node]
    able = [node for node in known if node["names"] not in excluded]
    able = sorted(
        (node for node in able if node["state"] in ("idle", "idle~")), key=lambda node: node["state"] == "idle"
    )
    wanted = int(options["nodes"])
    if sum(node["count"] for node in able) < wanted:
        print("srun: error: Unable to allocate resources: Requested nodes are busy", file=sys.stderr)
        return 1
    for node in able:
        if wanted > 0 and node["state"] == "idle~":
            with open(jobs_folder() / "woken", "a") as file:
                file.write(node["names"] + "\n")
        for number in range(min(wanted, node["count"])):
            own = {"SLURM_NODEID": str(number), "SLURMD_NODENAME": f"{node['names']}.{number}"}
            subprocess.run(command, env={**os.environ, **own}, check=False)
        wanted -= node["count"]
    return 0


def sinfo(words: list[str]) -> int:
    if "--version" in words:
        print("slurm 23.11.4")
        return 0
    partition = words[words.index("-p") + 1] if "-p" in words else None
    for node in read_nodes(partition):
        if node.get("hidden") and "-a" not in words:
            continue
        fields = {
            "R": node["partition"], "P": node["partition"] + "*" * (node["partition"] == "debug"), "l": "infinite",
            "D": node["count"], "G": node.get("gres", "(null)"), "T": node["state"], "N": node["names"],
            "f": node.get("features", "(null)"),
        }  # fmt: skip
        print("|".join(str(fields[letter.strip("%")]) for letter in words[words.index("-o") + 1].split("|")))
    return 0


def scontrol(words: list[str]) -> int:
    print("Slurmctld(primary) at here is UP" if words == ["ping"] else "KillWait                = 2 sec")
    return 0


def squeue(words: list[str]) -> int:
    format_text = words[words.index("-o") + 1]
    name = words[words.index("-n") + 1] if "-n" in words else None
    for job in read_jobs():
        if name not in (None, job["name"]):
            continue
        fields = {
            "i": job["id"], "T": job["state"], "V": int(job["submitted"]), "S": int(job["started"]),
            "e": int(job["ended"]) if job["ended"] else "N/A", "N": "n1", "r": "None", "k": job["comment"],
        }  # fmt: skip
        print("|".join(str(fields[letter.strip("%")]) for letter in format_text.split("|")))
    return 0


def scancel(words: list[str]) -> int:
    with controller():
        jobs = [job for job in read_jobs() if str(job["id"]) == words[0] and job["ended"] is None]
        for job in jobs:
            write_job({**job, "state": "CANCELLED"})
    for number in (signal.SIGTERM, signal.SIGKILL) if jobs else ():
        for pid in processes_of(words[0]):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        end = time.monotonic() + KILL_WAIT
        while processes_of(words[0]) and time.monotonic() < end:
            time.sleep(0.05)
    return 0


def processes_of(job: str) -> list[int]:
    marks = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={os.environ['SLURM_CONF']}".encode()}
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and marks <= set((path / "environ").read_bytes().split(b"\0")):
                found.append(int(path.name))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit({name: globals()[name] for name in COMMANDS}[sys.argv[1]](sys.argv[2:]))
