"""A run as a batch script: pure, and accepted by `sbatch --test-only`."""

import shlex
from collections.abc import Sequence

import templates
from mlbench_cli.agent.lock import NO_PROMISE, WHOLE_NODES
from mlbench_cli.agent.messages import MachinesPlan
from mlbench_cli.engines.machines.details import SlurmDetails
from mlbench_cli.engines.placement import share_nodes
from mlbench_cli.engines.plan import GRACE_SECONDS, MEETING_SECONDS, make_plan
from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.isolation import isolated_command
from mlbench_cli.model.spec import RunSpec

MARGIN_SECONDS = 60.0  # time to stop ranks and pack output
TEMPLATE = "slurm/job.sh.j2"
# sbatch and srun without the user's variables. Their own --export=NONE has each node build a login environment, which
# takes 2 s.
CLEAN = (
    *("/bin/sh", "-c"),
    'exec env -i PATH="$PATH" HOME="$HOME" USER="$(id -un)" ${SLURM_CONF:+"SLURM_CONF=$SLURM_CONF"} "$@"',
    "mlbench",
)
SETUP_FAILED = "mlbench: --setup failed"
# Starts the container ($0) with the libraries of the node's GPUs. Slurm does not say whose they are, and Singularity
# accepts only one of the two options.
GPU_CONTAINER = (
    'gpus=--nv; if test -e /dev/kfd && ! test -e /dev/nvidiactl; then gpus=--rocm; fi; exec "$0" exec "$gpus" "$@"'
)


def check_request(spec: RunSpec, details: SlurmDetails) -> None:
    """Reject what the cluster would accept but never start. Raises CapacityError or UsageError."""
    partition = details.find_partition()
    if partition is None:
        return
    name = details.partition or next(name for name, item in details.partitions.items() if item is partition)
    # A partition whose cloud nodes are powered down may count none of them.
    if partition["nodes"] and spec.workers > partition["nodes"]:
        raise CapacityError(
            f'{spec.name} needs {spec.workers} nodes, but the partition "{name}" has {partition["nodes"]}.',
            hint="Use fewer workers, or attach another partition: mlbench attach-slurm NAME --partition P",
        )
    if spec.gpus_per_worker > partition["gpus_per_node"]:
        raise CapacityError(
            f'{spec.name} needs {spec.gpus_per_worker} GPUs per node, but those of the partition "{name}" have '
            f"{partition['gpus_per_node']}.",
            hint="Remove --gpu, or attach another partition: mlbench attach-slurm NAME --partition P",
        )
    limit = partition["max_seconds"]
    if limit is not None and spec.timeout > limit:
        raise UsageError(
            f'{spec.name} may take {spec.timeout:g} s, but the partition "{name}" ends jobs after {limit} s.',
            hint=f"--timeout {limit}s, or attach another partition: mlbench attach-slurm NAME --partition P",
        )


def make_slurm_plan(spec: RunSpec, details: SlurmDetails) -> MachinesPlan:
    """The plan of the agents. Their grace period after TERM is shorter than Slurm's, so that evidence is written in
    time."""
    lock = WHOLE_NODES if details.exclusive else NO_PROMISE
    grace = min(GRACE_SECONDS, max(1.0, details.kill_wait / 2))
    return make_plan(spec, details, share_nodes(spec), lock=lock, launcher=_launcher(spec, details), grace=grace)


def render_script(spec: RunSpec, details: SlurmDetails, code_folder: str) -> str:
    """The batch script. The same spec and cluster give the same bytes."""
    check_request(spec, details)
    run = f"{details.folder}/runs/{spec.name}"
    return templates.render(
        TEMPLATE,
        {
            "options": _options(spec, details, run),
            "run": shlex.quote(run),
            "setup": watch_setup(details.setup),
            "step": shlex.join(_step(spec, details)),
            "command": shlex.join(isolated_command("mlbench_cli.agent.node", details.python, code_folder)),
        },
    )


def watch_setup(setup: str) -> str:
    """The lines of --setup, sourced, and what notes the first command of them that fails or exits, and ends the script.
    The probe of attach-slurm runs the same lines in the same shell and environment. Empty without lines."""
    if not setup.strip():
        return ""
    return "\n".join(
        (
            "set +u",
            r"""mlbench_failed() { set -- "exit code $1 from: ${2/#source \/dev\/fd\/3*/the end of the lines}" """,
            f"""trap - ERR EXIT; echo "{SETUP_FAILED}: $1" >&2""",
            """[ -z "${run:-}" ] || echo "$1" >"$run/setup.failed"; exit 78; }""",
            """trap 'mlbench_failed "$?" "$BASH_COMMAND"' ERR""",
            """trap 'mlbench_failed "$?" "a line that ended the shell"' EXIT""",
            "source /dev/fd/3 3<<'MLBENCH_SETUP'",
            setup.rstrip(),
            "MLBENCH_SETUP",
            "trap - ERR EXIT; set +e",
        )
    )


def job_name(spec: RunSpec) -> str:
    """The name under which `squeue` lists the run."""
    return f"mlbench-{spec.name}"


def job_comment(spec: RunSpec, run_id: str) -> str:
    """The comment by which a job is found again: it names the run and the hash of its spec."""
    return f"mlbench:{run_id}:{spec.hash}"


def wall_seconds(spec: RunSpec, details: SlurmDetails) -> int:
    """The job's time limit: that of the run, and what starting and packing may take, within the partition's."""
    wanted = int(spec.timeout + MARGIN_SECONDS + (MEETING_SECONDS if spec.workers > 1 else 0))
    partition = details.find_partition()
    limit = partition["max_seconds"] if partition is not None else None
    return wanted if limit is None else min(wanted, limit)


def format_time(seconds: int) -> str:
    """D-HH:MM:SS, rounded up to a minute: Slurm counts in minutes."""
    minutes = -(-seconds // 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def _options(spec: RunSpec, details: SlurmDetails, run: str) -> list[str]:
    chosen = {
        "partition": details.partition,
        "account": details.slurm_account,
        "qos": details.qos,
        "constraint": details.constraint,
        "switches": details.switches,
        "nodelist": ",".join(spec.nodes) or None,
        "gres": f"gpu:{spec.gpus_per_worker}" if spec.gpus_per_worker else None,
        "cpus-per-task": None if spec.cpus is None else str(int(spec.cpus)),
    }
    return [
        f"--job-name={job_name(spec)}",
        f"--nodes={spec.workers}",
        "--ntasks-per-node=1",
        f"--time={format_time(wall_seconds(spec, details))}",
        *(["--exclusive"] if details.exclusive else []),
        *(f"--{name}={value}" for name, value in chosen.items() if value is not None),
        *([] if spec.absent_seconds is None else ["--no-kill"]),  # a node that fails does not end the job
        "--no-requeue",
        "--export=ALL",
        "--open-mode=append",
        f"--chdir={run}",
        f"--output={run}/batch.log",
    ]


def _step(spec: RunSpec, details: SlurmDetails) -> list[str]:
    """srun's options: the agents, not srun, handle the ends of ranks, and ranks may use all CPUs of their node."""
    words = [f"--nodes={spec.workers}", f"--ntasks={spec.workers}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    words += [] if spec.absent_seconds is None else ["--no-kill"]
    words += ["--cpu-bind=none", "--export=ALL", f"--output={details.folder}/runs/{spec.name}/step.log"]
    words += [] if spec.cpus is None else [f"--cpus-per-task={int(spec.cpus)}"]
    if spec.image is not None and details.container == "pyxis":
        mounts = ",".join(f"{folder}:{folder}" for folder in _mounts(spec, details))
        words += [f"--container-image={spec.image}", f"--container-mounts={mounts}"]
    return words


def _launcher(spec: RunSpec, details: SlurmDetails) -> Sequence[str]:
    """The command that starts a rank in its container; empty with pyxis, where the step already runs in it."""
    if spec.image is None or details.container == "pyxis":
        return ()
    if details.container is None:
        raise UsageError(
            "--image: the cluster has neither pyxis, apptainer nor singularity, so no container can be started.",
            hint="Remove --image and choose Python or modules: mlbench attach-slurm NAME --python PATH --setup FILE",
        )
    binds = [word for folder in _mounts(spec, details) for word in ("--bind", folder)]
    image = spec.image if spec.image.startswith(("/", "docker://", "oras://")) else f"docker://{spec.image}"
    words = (details.container, *binds, image)
    return ("sh", "-c", GPU_CONTAINER, *words) if spec.gpus_per_worker else (words[0], "exec", *words[1:])


def _mounts(spec: RunSpec, details: SlurmDetails) -> list[str]:
    return [details.folder, *([spec.data_dir] if spec.data_dir else [])]
