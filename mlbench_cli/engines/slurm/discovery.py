"""Facts about a Slurm cluster, collected when it is attached and by `mlbench doctor slurm`."""

import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlbench_cli.agent.channel import Channel, Document, Target
from mlbench_cli.agent.serve import PACKAGES
from mlbench_cli.engines.machines.details import PartitionRecord, SlurmDetails
from mlbench_cli.engines.machines.engine import check_folder
from mlbench_cli.engines.slurm import controller
from mlbench_cli.engines.slurm.script import CLEAN, SETUP_FAILED, watch_setup
from mlbench_cli.errors import CapacityError, NotFoundError, UnreachableError, UsageError, did_you_mean

PROBE_SECONDS = 60.0
A_GPU = "--gres=gpu:1"
_NO_NODE = re.compile("nodes are busy|immediate", re.IGNORECASE)
_VERSIONS = PACKAGES + (
    "import importlib.metadata as m\n"
    "try: v = m.version('torch')\n"
    "except Exception: v = ''\n"
    "print('|'.join((sys.version.split()[0], v, ','.join(packages))))"
)
# Runs on each node: $0 is a file in the shared folder, $1 the Python; the answer is one line. Login shells and Pythons
# may print lines of their own before it.
_ANSWER = "mlbench-probe"
_PROBE = (
    'versions=$("$1" -c "$2" 2>/dev/null) || versions="||"; '
    f'printf "\\n{_ANSWER}|%s|%s|%s\\n" "${{SLURMD_NODENAME:-$(hostname)}}" '
    '"$( (: >"$0.$SLURM_NODEID" && cat "$0") 2>/dev/null)" "$(echo "$versions" | tail -n 1)"'
)


@dataclass(frozen=True)
class SlurmFacts:
    """Facts about the cluster. `container` is the program for images: pyxis, apptainer, singularity or None."""

    version: str
    partitions: Mapping[str, PartitionRecord]
    kill_wait: int
    min_job_age: int
    has_accounting: bool
    container: str | None
    host: Document

    @property
    def default_partition(self) -> str | None:
        """The partition that Slurm takes if none is named; None if it has no such partition."""
        return next((name for name, item in self.partitions.items() if item["default"]), None)


@dataclass(frozen=True)
class NodeProbe:
    """What one node has answered; `torch` is empty without it. `sees_folder`: it reads and writes the shared one."""

    node: str
    sees_folder: bool
    python: str
    torch: str
    packages: tuple[str, ...]


def open_login(login: str | None, python: str, ssh_config: str | None) -> Channel:
    """A channel to the login node, by the Python of the runs, or by another one where only the nodes have that.

    Raises the error of the first.
    """
    problem: UsageError | None = None
    for candidate in dict.fromkeys((python, "python3")):
        channel = Channel(Target(login, candidate, ssh_config))
        try:
            channel.call("hello")
            return channel
        except UsageError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def discover_cluster(channel: Channel, folder: str) -> SlurmFacts:
    """Ask the login node. Raises UnreachableError, UsageError for no Slurm or one that is too old."""
    host = channel.call("hello", base=folder)
    version = controller.ask(channel, ["sinfo", "--version"])
    found = controller.parse_version(version.out)
    if version.code != 0 or found is None:
        raise UsageError(
            f"{channel.target.name} has no Slurm: {(version.err or version.out).strip() or 'sinfo says nothing'}.",
            hint="Name a login node: --login USER@HOST",
        )
    if found < controller.MIN_VERSION:
        raise UsageError(
            f"{channel.target.name} has Slurm {found[0]}.{found[1]:02d}; mlbench needs 21.08 or later.",
            hint="You can attach its machines as plain hosts: mlbench attach-hosts --help",
        )
    ping = controller.ask(channel, ["scontrol", "ping"])
    if ping.code != 0:
        raise UnreachableError(f"Slurm's controller is not responding: {ping.out.strip()}", hint="scontrol ping")
    config = controller.parse_config(controller.ask(channel, ["scontrol", "show", "config"]).out)
    sinfo = controller.ask(channel, ["sinfo", "-a", "-h", "-o", "%R|%l|%D|%G|%P"])
    return SlurmFacts(
        version=version.out.split()[-1],
        partitions=controller.parse_partitions(sinfo.out),
        kill_wait=_seconds(config.get("KillWait"), 30),
        min_job_age=_seconds(config.get("MinJobAge"), 300),
        has_accounting=config.get("AccountingStorageType", "accounting_storage/none").endswith("slurmdbd"),
        container=_find_container(channel),
        host=host,
    )


def check_choice(channel: Channel, facts: SlurmFacts, details: SlurmDetails) -> None:
    """Reject an unknown partition, account or QOS, and a folder that cannot be used. Raises NotFoundError, UsageError
    or CapacityError."""
    check_folder(facts.host, details.folder, channel.target.name, "--shared DIR")
    if details.partition is not None and details.partition not in facts.partitions:
        near = did_you_mean(details.partition, list(facts.partitions))
        raise NotFoundError(
            f'The cluster has no partition "{details.partition}", only {", ".join(facts.partitions)}.{near}',
            hint="sinfo -s",
        )
    if details.partition is None and facts.default_partition is None:
        raise UsageError(
            "The cluster has no default partition.", hint=f"--partition {next(iter(facts.partitions), 'P')}"
        )
    if facts.has_accounting:
        _check_association(channel, details)
    elif details.slurm_account or details.qos:
        raise UsageError(
            "The cluster has no accounting: it would accept any --account and --qos, and ignore them.",
            hint="Leave them out.",
        )


def _check_association(channel: Channel, details: SlurmDetails) -> None:
    argv = [
        "sacctmgr",
        "-n",
        "-P",
        "show",
        "assoc",
        "where",
        "user=" + _user(channel),
        "format=Account,QOS",
    ]
    answer = controller.ask(channel, argv)
    known = parse_associations(answer.out)
    if answer.code != 0 or not known:
        return
    # Slurm knows accounts and QOS in lower case, and takes them in any.
    if details.slurm_account is not None and details.slurm_account.lower() not in known:
        raise NotFoundError(
            f'You have no account "{details.slurm_account}" on this cluster, only {", ".join(sorted(known))}.'
            f"{did_you_mean(details.slurm_account, sorted(known))}",
            hint="sacctmgr show assoc user=$USER",
        )
    accounts = known if details.slurm_account is None else (details.slurm_account.lower(),)
    allowed = {name for account in accounts for name in known[account]}
    if details.qos is not None and allowed and details.qos.lower() not in allowed:
        raise NotFoundError(
            f'Your account cannot use the QOS "{details.qos}", only {", ".join(sorted(allowed))}.',
            hint="sacctmgr show assoc user=$USER format=account,qos",
        )


def parse_associations(text: str) -> dict[str, set[str]]:
    """`sacctmgr -n -P show assoc format=Account,QOS`: account to the names of its QOS."""
    known: dict[str, set[str]] = {}
    for line in text.splitlines():
        account, separator, names = line.strip().partition("|")
        if separator and account:
            known.setdefault(account.lower(), set()).update(name for name in names.lower().split(",") if name)
    return known


def _user(channel: Channel) -> str:
    return controller.ask(channel, ["id", "-un"]).out.strip()


# What sinfo puts behind a state.
_MARKS = {
    "~": "powered down",
    "#": "powering up",
    "%": "powering down",
    "!": "powering down",
    "$": "reserved",
    "*": "not responding",
    "@": "to be rebooted",
    "^": "rebooting",
    "-": "planned for another job",
    "+": "in use",
}
_SHORT = {"drng": "draining", "drain": "drained", "comp": "completing", "plnd": "planned", "resv": "reserved"}


@dataclass(frozen=True)
class NodeCount:
    """The nodes of a partition that can run a job now, by Slurm's own states; `others`: state -> how many.

    `not_idle` are the others as a host list: powered-down nodes among them would be started.
    """

    idle: int
    others: Mapping[str, int]
    not_idle: str

    @property
    def phrase(self) -> str:
        """ "1 is drained, 8 are powered down"; empty if there are no others."""
        found: dict[str, int] = {}
        for state, count in self.others.items():
            base, marks = state.rstrip("".join(_MARKS)), state[len(state.rstrip("".join(_MARKS))) :]
            told = [_MARKS[mark] for mark in marks if mark in "~#%!$" or base == "idle"]
            name = told[0] if told else _SHORT.get(base, base).replace("_", " ")
            found[name] = found.get(name, 0) + count
        return ", ".join(f"{count} {'is' if count == 1 else 'are'} {name}" for name, count in sorted(found.items()))


def probe_nodes(channel: Channel, details: SlurmDetails, found: NodeCount) -> list[NodeProbe]:
    """One short job on the idle nodes, as many of them as Slurm gives: whether each sees the folder, and its versions.

    It starts no powered-down node, and leaves no job. The lines of --setup run in the shell and environment of a run's
    job. Raises UsageError if one of them fails, CapacityError if no node is free now, and the error that explains what
    else Slurm refuses.
    """
    token, path = secrets.token_hex(8), f"{details.folder}/probe-{secrets.token_hex(4)}/token"
    channel.call("put", token.encode(), path=path, mode=0o644, new=True)
    python = details.python
    # In each node's login shell, as the batch script of a run on its first node.
    raw = f'probe=("$@"); set --\n{watch_setup(details.setup)}\nexec /bin/sh -c "${{probe[@]}}"'
    words = ["/bin/bash", "-lc", raw, "setup", _PROBE, path, python, _VERSIONS]
    name = f"mlbench-probe-{secrets.token_hex(4)}"
    argv = [
        "--ntasks-per-node=1",
        "--time=0-00:01:00",
        "--immediate=30",
        "--chdir=/",
    ]
    argv += [f"--partition={details.partition}"] if details.partition else []
    argv += [f"--account={details.slurm_account}"] if details.slurm_account else []
    argv += [f"--qos={details.qos}"] if details.qos else []
    argv += [f"--constraint={details.constraint}"] if details.constraint else []
    argv += [f"--exclude={found.not_idle}"] if found.not_idle else []
    partition = details.find_partition()
    has_gpus = partition is not None and partition["gpus_per_node"] > 0
    answer = controller.Answer(None, "", "")
    try:
        # One node at least, if others take nodes, or a limit is lower; a GPU, where sites refuse jobs without.
        choices = ((), (A_GPU,)) if has_gpus else ((),)
        for count, devices in dict.fromkeys((count, each) for each in choices for count in (found.idle, 1)):
            command = [*CLEAN, "srun", f"--nodes={count}", *argv, *devices, f"--job-name={name}", *words]
            answer = controller.ask(channel, command, seconds=PROBE_SECONDS)
            is_answered = answer.code in (0, None) or SETUP_FAILED in answer.err
            if is_answered or (count == 1 and _NO_NODE.search(answer.err)):
                break
    finally:
        if answer.code != 0:  # srun was killed, or gave up: its job may still wait for nodes, or run
            controller.ask(channel, ["scancel", f"--name={name}"])
        controller.ask(channel, ["rm", "-r", path.rpartition("/")[0]])
    probes = parse_probes(answer.out, token)
    if failed := [line for line in answer.err.splitlines() if SETUP_FAILED in line]:
        lines = [line.strip() for line in answer.err.splitlines() if line.strip()]
        said = [line for line in lines if SETUP_FAILED not in line and not line.startswith("srun: ")]
        raise UsageError(
            f"A line of --setup failed on the nodes: {failed[0].rpartition(SETUP_FAILED)[2].strip(': ')}."
            f"{' It said: ' + said[-1][:200] if said else ''}",
            hint="The lines run in a login shell (bash -l) without your session's variables and functions; "
            "add || true to a line that may fail.",
        )
    if not probes:
        late = CapacityError(f"The nodes could not be probed: no answer within {PROBE_SECONDS:g} s")
        error = late if answer.code is None else controller.explain_refusal(answer)
        if isinstance(error, CapacityError):
            error.hint = "Try again when nodes are free, or add --no-probe."
        raise error
    return probes


def parse_probes(text: str, token: str) -> list[NodeProbe]:
    """The answers of the probe job, sorted by node. Lines that others have printed are ignored."""
    probes = []
    for line in text.splitlines():
        answer, *parts = line.split("|")
        if answer == _ANSWER and len(parts) == 5:
            probes.append(NodeProbe(parts[0], parts[1] == token, parts[2], parts[3], tuple(parts[4].split(","))))
    return sorted(probes, key=lambda probe: probe.node)


def check_probes(probes: Sequence[NodeProbe], details: SlurmDetails) -> None:
    """Reject a folder that is not shared, and nodes that differ. Raises UsageError."""
    blind = [probe.node for probe in probes if not probe.sees_folder]
    if blind:
        raise UsageError(
            f"The folder {details.folder} is not shared: {', '.join(blind)} cannot read what the login node wrote, or "
            "cannot write there.",
            hint="--shared DIR   must be a folder that the login node and all nodes share",
        )
    missing = [probe.node for probe in probes if not probe.python]
    if missing:
        raise UsageError(
            f"{details.python} cannot be run on {', '.join(missing)}.",
            hint="--python PATH, or --setup FILE with the lines that load it (module load ...)",
        )
    for what, values in (
        ("Python", {probe.python for probe in probes}),
        ("torch", {probe.torch or "none" for probe in probes}),
    ):
        if len(values) > 1:
            raise UsageError(
                f"The nodes have different versions of {what}: "
                + ", ".join(
                    f"{probe.node} {probe.python if what == 'Python' else probe.torch or 'none'}" for probe in probes
                ),
                hint="--python PATH   must be one environment that all nodes share",
            )


def count_nodes(channel: Channel, details: SlurmDetails, default: str | None = None) -> NodeCount:
    """The nodes of the partition (`default` if none is chosen) that can run a job now, and the others, by exact state:
    `sinfo -t idle` also counts nodes that are drained, reserved, planned or powered down."""
    argv = ["sinfo", "-a", "-h", "-o", "%D|%T|%N|%f"]
    partition = details.partition or default
    argv += ["-p", partition] if partition else []
    return parse_nodes(controller.ask(channel, argv).out, details.constraint)


def parse_nodes(text: str, constraint: str | None = None) -> NodeCount:
    """Lines "count|state|nodes|features" of sinfo. Nodes without the features of `constraint` count as others."""
    idle, others, names = 0, dict[str, int](), []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 4 or not (parts[0].isascii() and parts[0].isdigit()):
            continue
        count, state = int(parts[0]), parts[1].lower()
        fits = _fits(constraint, {word.strip() for word in parts[3].split(",")})
        if state == "idle" and fits:
            idle += count
            continue
        names.append(parts[2])
        state = state if state != "idle" else "without the constraint"
        others[state] = others.get(state, 0) + count
    return NodeCount(idle, others, ",".join(names))


def _fits(constraint: str | None, features: set[str]) -> bool:
    """Whether a node may be what a constraint asks for; of forms other than A&B and A|B, one of the words is enough."""
    if not constraint:
        return True
    wanted = set(re.findall(r"[A-Za-z0-9_.=-]+", re.sub(r"\*\d+", "", constraint)))
    return wanted <= features if not set("|[") & set(constraint) else bool(wanted & features)


def _find_container(channel: Channel) -> str | None:
    if "--container-image" in controller.ask(channel, ["srun", "--help"]).out:
        return "pyxis"
    for name in ("apptainer", "singularity"):
        if controller.ask(channel, ["sh", "-c", f"command -v {shlex.quote(name)}"]).code == 0:
            return name
    return None


def _seconds(text: str | None, default: int) -> int:
    digits = (text or "").split()[0] if (text or "").split() else ""
    return int(digits) if digits.isdigit() else default
