"""Slurm's commands and their output. Uses text in a custom format, because Slurm's JSON changes with every release."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlbench_cli.agent.channel import Channel
from mlbench_cli.engines.machines.details import PartitionRecord
from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UnreachableError, UsageError

COMMAND_SECONDS = 45.0  # a controller that is down answers after 9 to 18 s
SEPARATOR = "|"
FIELDS = "%i|%T|%S|%e|%N|%r"
ENDED_STATES = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
PENDING_STATES = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT", "CONFIGURING"}
)
MIN_VERSION = (21, 8)


@dataclass(frozen=True)
class JobReport:
    """One job as Slurm describes it. Times are seconds since 1970, None if Slurm does not say."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    started: float | None = None
    ended: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether Slurm lists the job as ended, in whatever way."""
        return self.state in ENDED_STATES

    @property
    def is_pending(self) -> bool:
        """Whether the job is pending."""
        return self.state in PENDING_STATES

    @property
    def waits_for(self) -> str:
        """Slurm's reason for a pending job, "None" without one; or the state of a job whose nodes are powered up."""
        return self.state if self.state == "CONFIGURING" else self.reason or "None"


@dataclass(frozen=True)
class Answer:
    """One command's exit code (None: no answer in time), output and errors."""

    code: int | None
    out: str
    err: str


def ask(channel: Channel, argv: Sequence[str], stdin: str = "", seconds: float = COMMAND_SECONDS) -> Answer:
    """Run a command of Slurm on the login node, for at most `seconds`. A failing command is an answer, too."""
    document = channel.call("run", argv=list(argv), timeout=seconds, stdin=stdin, seconds=seconds + 20)
    return Answer(document["code"], document["out"], document["err"])


def list_jobs(channel: Channel) -> dict[str, JobReport]:
    """All of this user's jobs that the controller remembers, by id: one squeue. Raises UnreachableError."""
    answer = ask(channel, ["squeue", "-h", "--me", "-t", "all", "-o", FIELDS])
    if answer.code != 0:
        raise no_controller(answer)
    return parse_jobs(answer.out)


def parse_jobs(text: str) -> dict[str, JobReport]:
    """Jobs by number in lines of FIELDS or of sacct; other lines are skipped, and the last of several for one counts.

    "CANCELLED by 1000" of sacct is CANCELLED.
    """
    jobs = {}
    for line in text.splitlines():
        parts = line.split(SEPARATOR, 5)
        if len(parts) == 6 and _is_number(parts[0]) and parts[1].strip():
            number, state, started, ended, nodes, reason = parts
            times = _seconds(started), _seconds(ended)
            jobs[number] = JobReport(number, state.split()[0].rstrip("+"), reason.strip(), nodes, *times)
    return jobs


def find_jobs(channel: Channel, name: str, comment: str) -> list[str]:
    """Ids of the jobs of this name and comment, lowest first, without those that were refused at submission."""
    answer = ask(channel, ["squeue", "-h", "--me", "-t", "all", "-n", name, "-o", "%i|%T|%r|%k"])
    if answer.code != 0:
        raise no_controller(answer)
    found = []
    for line in answer.out.splitlines():
        number, state, reason, text = [*line.split(SEPARATOR, 3), "", "", ""][:4]
        refused = state == "FAILED" and reason == "BadConstraints"
        if _is_number(number) and text == comment and not refused:
            found.append(int(number))
    return [str(number) for number in sorted(found)]


def ask_accounting(channel: Channel, number: str) -> JobReport | None:
    """The job as the accounting database knows it; None if it does not."""
    argv = ["sacct", "-X", "-n", "-P", "-j", number, "-o", "JobIDRaw,State,Start,End,NodeList,Reason"]
    answer = ask(channel, argv)
    return parse_jobs(answer.out).get(number) if answer.code == 0 else None


def cancel_job(channel: Channel, number: str) -> None:
    """Cancel a job; one that has ended is no error. Raises the error that explains Slurm's refusal."""
    answer = ask(channel, ["scancel", number])
    if answer.code != 0 and not _ENDED.search(answer.err):
        raise explain_refusal(answer)


def no_controller(answer: Answer) -> UnreachableError:
    """The error for a command that the controller did not answer; it says nothing about any job."""
    lines = answer.err.strip().splitlines()
    return UnreachableError(
        f"Slurm's controller is not responding: {lines[-1] if lines else 'no reason given'}", hint="scontrol ping"
    )


# Slurm's own texts (src/common/slurm_errno.c, slurmctld's reasons) -> what they mean. The first that is found counts.
_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|timed out|zero bytes|controller not responding|"
    r"resource temporarily unavailable|rate limit exceeded|"
    r"standby mode|authentication error|munge|connection refused|connection reset|unable to accept job|"
    r"fetch_config|configuration source|resolve_ctls|protocol version|incompatible versions|"
    r"(?:connection|send|receive|shutdown) failure|"
    r"unexpected (?:message|missing socket)|transport endpoint|no route to host",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"\b(?:Assoc|QOS)(?:Max|Min|Grp|Time)\w*|accounting/QOS policy|MaxJobCount|too many jobs")
_PERMISSION = re.compile(
    r"not permitted|permission denied|access denied|invalid account|invalid qos|invalid wckey|invalid user|not allowed|"
    r"account or account/partition|"
    # Of sites' plug-ins, behind which Slurm gives no reason.
    r"\b(?:specify|provide|requires?|needs?|missing|no) (?:(?:an?|your|valid|the|project) )*(?:account|allocation)\b",
    re.IGNORECASE,
)
_MISTAKE = re.compile(
    r"invalid partition|no partition specified|time limit is invalid|time limit specification|unrecognized option|"
    r"invalid directive|invalid option|invalid --|unknown option|dos line breaks|invalid job name|requires an argument|"
    r"invalid job array|nodes not in this partition|invalid node name",
    re.IGNORECASE,
)
_ENDED = re.compile(r"invalid job id|already (?:completing or completed|finished)", re.IGNORECASE)
# Slurm's verdict. Other lines are of sites' plug-ins, which print what they like; they count if Slurm gives no reason.
_VERDICT = re.compile(
    r"(?:batch job submission failed|unable to allocate resources|allocation failure): (.*)", re.IGNORECASE
)
_NO_REASON = ("", "Unspecified error")
_SPEAKER = re.compile(r"\b(?:sbatch|srun|scancel): (?:error: )?")


def explain_refusal(answer: Answer) -> MlbenchError:
    """The error for a rejection by sbatch, srun or scancel, by Slurm's own texts: a limit or lack of nodes is 5, a
    missing right 3, a controller that cannot answer 10, a wrong request 2. What is unknown may pass by itself. Pure."""
    text = " ".join(answer.err.split())
    verdict = (_VERDICT.findall(answer.err) or [""])[-1].strip()
    said = text if verdict in _NO_REASON else verdict
    words = _VERDICT.sub(r"\1", _SPEAKER.sub("", text)) or "no reason given"
    attach = "mlbench attach-slurm NAME"
    if answer.code == 127:
        return NotFoundError(f"The login node has no sbatch: {text or 'it was not found'}", hint="mlbench doctor slurm")
    if answer.code is None or _UNREACHABLE.search(said):
        return no_controller(answer)
    if _LIMIT.search(said):
        return CapacityError(
            f"A limit of your account or QOS is reached. Slurm says: {words}",
            hint="squeue --me; sacctmgr show assoc user=$USER   Wait for your other jobs, or ask for less.",
        )
    if _PERMISSION.search(said):
        options = "--account A, --qos Q or --partition P"
        return CredentialError(
            f"Slurm does not permit the job: {words}", hint=f"sacctmgr show assoc user=$USER; then {attach} {options}"
        )
    if _MISTAKE.search(said):
        return UsageError(
            f"Slurm rejects the request: {words}",
            hint=f"sinfo -o '%P %l'; --timeout SECONDS, or {attach} --partition P; --dry-run prints the script",
        )
    return CapacityError(f"Slurm says: {words}", hint="sinfo -N -l; mlbench run ... --dry-run   prints the script")


def find_number(text: str) -> str | None:
    """The job's number in the output of `sbatch --parsable`: the last line that is NUMBER or NUMBER;CLUSTER, or what a
    wrapper without that option prints. Sites print their own lines before and after it."""
    found = re.findall(r"^\s*([0-9]+)(?:;[^\s;]+)?\s*$", text, re.MULTILINE)
    found = found or re.findall(r"^Submitted batch job ([0-9]+)\b", text, re.MULTILINE)
    return str(found[-1]) if found else None


def parse_version(text: str) -> tuple[int, int] | None:
    """ "slurm-wlm 22.05.8" -> (22, 5), among lines of a site's own."""
    match = re.search(r"^slurm\S*\s+(\d{2})\.(\d{2})", text, re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else None


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: name to value."""
    pairs = (line.partition("=") for line in text.splitlines() if " = " in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_partitions(text: str) -> dict[str, PartitionRecord]:
    """`sinfo -h -o '%R|%l|%D|%G|%F'`, one line for each kind of node: the nodes of a partition are added up."""
    partitions: dict[str, PartitionRecord] = {}
    for line in text.splitlines():
        parts = line.strip().split(SEPARATOR)
        if len(parts) != 5 or not _is_number(parts[2]):
            continue
        name, limit, nodes, gres, mark = parts
        gpus = _count_gpus(gres)
        known = partitions.get(name, PartitionRecord(max_seconds=None, nodes=0, gpus_per_node=0, default=False))
        partitions[name] = PartitionRecord(
            max_seconds=parse_limit(limit),
            nodes=known["nodes"] + int(nodes),
            gpus_per_node=max(known["gpus_per_node"], gpus),
            default=mark.endswith("*"),
        )
    return partitions


def _count_gpus(gres: str) -> int:
    """The GPUs in a node's GRES, "gpu:a100:no_consume:4(S:0-1),nvme:1": the number is last, behind type and marks."""
    items = (item.rpartition(":") for item in re.sub(r"\([^)]*\)", "", gres).split(","))
    return sum(int(count) for name, _, count in items if name.partition(":")[0] == "gpu" and _is_number(count))


def parse_limit(text: str) -> int | None:
    """A time limit as Slurm writes it, in seconds: MM:SS, HH:MM:SS, D-HH:MM:SS; None for "infinite"."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _seconds(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text.strip()) else None
