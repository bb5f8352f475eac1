"""The table of commands: where each is found, and the one line that `mlbench --help` says of it.

A new command is a file beside this one and a line in PANELS. Its function (or `typer.Typer`, for one with
sub-commands) is imported only when the command runs; it returns None or an exit code, and raises MlbenchError.
This module is imported by `mlbench --help`: standard library only.
"""

from typing import NamedTuple


class Command(NamedTuple):
    """Where a command is found, and what `mlbench --help` says of it."""

    module: str
    attribute: str
    help: str


PANELS: dict[str, dict[str, Command]] = {
    "Runs": {
        "run": Command("mlbench_cli.commands.run", "run", "Run a task with one or several numbers of workers"),
        "campaign": Command("mlbench_cli.commands.campaign", "campaign", "Run a file of many settings, with a table"),
        "status": Command("mlbench_cli.commands.status", "status", "Show all runs, or the workers and metrics of one"),
        "logs": Command("mlbench_cli.commands.logs", "logs", "Print what the ranks of a run have written"),
        "wait": Command("mlbench_cli.commands.wait", "wait", "Wait for a run to end; the exit code is the run's"),
        "discover": Command(
            "mlbench_cli.commands.discover", "discover", "Record the runs of a cluster that another machine started"
        ),
        "cancel": Command("mlbench_cli.commands.cancel", "cancel", "Stop a run and keep what there is"),
        "delete": Command("mlbench_cli.commands.delete", "delete", "Remove a run and its results"),
    },
    "Results": {
        "download": Command("mlbench_cli.commands.download", "download", "Write a run's results to a zip file"),
        "verify": Command("mlbench_cli.commands.verify", "verify", "Prove what archives say, and whose they are"),
        "sign": Command("mlbench_cli.commands.sign", "sign", "Sign archives with an OpenSSH key"),
        "compare": Command("mlbench_cli.commands.compare", "compare", "Set two results side by side"),
        "predict": Command(
            "mlbench_cli.commands.predict", "predict", "Predict steps with other workers, networks and methods"
        ),
        "gate": Command("mlbench_cli.commands.gate", "gate", "Hold results against a baseline, for CI"),
        "baselines": Command(
            "mlbench_cli.commands.baselines", "baselines", "Hold results against what their machines should reach"
        ),
        "report": Command("mlbench_cli.commands.report", "report", "Write one page about runs, with all figures"),
        "export": Command("mlbench_cli.commands.export", "export", "Write results for TensorBoard, MLflow, Parquet …"),
        "charts": Command("mlbench_cli.commands.charts", "charts", "Draw time, speedup and phases of finished runs"),
    },
    "Dashboard": {
        "serve": Command("mlbench_cli.commands.serve", "serve", "Serve the dashboard and REST API on this machine"),
        "get-dashboard-url": Command(
            "mlbench_cli.commands.serve", "get_dashboard_url", "Print the address of the dashboard that runs here"
        ),
    },
    "Clusters": {
        "create-cluster": Command(
            "mlbench_cli.commands.create_cluster", "create_cluster", "Make a cluster, after showing what it costs"
        ),
        "attach-cluster": Command(
            "mlbench_cli.commands.attach_cluster", "attach_cluster", "Use a Kubernetes cluster that you already have"
        ),
        "attach-slurm": Command("mlbench_cli.commands.attach_slurm", "attach_slurm", "Use a Slurm cluster"),
        "attach-hosts": Command("mlbench_cli.commands.attach_hosts", "attach_hosts", "Use a list of hosts over ssh"),
        "scale-cluster": Command(
            "mlbench_cli.commands.scale_cluster", "scale_cluster", "Change a cluster's number of machines"
        ),
        "delete-cluster": Command(
            "mlbench_cli.commands.delete_cluster", "delete_cluster", "Remove a cluster and all that belongs to it"
        ),
        "extend": Command("mlbench_cli.commands.extend", "extend", "Let a cluster live longer than its --ttl"),
        "prices": Command("mlbench_cli.commands.prices", "prices", "Show or update what machines cost"),
        "gc": Command("mlbench_cli.commands.gc", "gc", "Remove clusters that are expired or forgotten"),
        "images": Command("mlbench_cli.commands.images", "images", "Show or push the images of tasks"),
        "kubeconfig": Command("mlbench_cli.commands.kubeconfig", "kubeconfig", "Use a cluster with kubectl"),
        "list-clusters": Command("mlbench_cli.commands.list_clusters", "list_clusters", "Show the known clusters"),
        "set-cluster": Command("mlbench_cli.commands.set_cluster", "set_cluster", "Choose the cluster to run on"),
    },
    "Help": {
        "methods": Command(
            "mlbench_cli.commands.methods", "methods", "Show how ranks can communicate, or one method with its axes"
        ),
        "tasks": Command("mlbench_cli.commands.tasks", "tasks", "Show the benchmark tasks, or one with its parameters"),
        "completion": Command(
            "mlbench_cli.commands.completion", "completion", "Print the completion script of bash, zsh or fish"
        ),
        "data": Command("mlbench_cli.commands.data", "data", "Make the data of a task ready before a run"),
        "config": Command("mlbench_cli.commands.config", "config", "Show and change the defaults of options"),
        "doctor": Command("mlbench_cli.commands.doctor", "doctor", "Check what this machine has and what is missing"),
    },
}

EXIT_CODES = {
    0: "done",
    1: "internal error",
    2: "wrong command line, spec file or configuration",
    3: "no credentials, no permission, or an origin that is not proven",
    4: "no such cluster, run or file",
    5: "quota exceeded, or no capacity",
    6: "the workers never started",
    7: "the task failed, or a gate failed, or --require-goal was not met",
    8: "the work is done, but clean-up or archive is incomplete",
    9: "cannot tell: not enough evidence for a gate or comparison",
    10: "a cluster or host does not answer",
    124: "a deadline has passed",
    130: "interrupted (SIGINT)",
    143: "terminated (SIGTERM)",
}


def find(name: str) -> Command | None:
    """The command of that name."""
    return next((commands[name] for commands in PANELS.values() if name in commands), None)


def names() -> list[str]:
    """The names of all commands, in the order of the panels."""
    return [name for commands in PANELS.values() for name in commands]


def help_text() -> str:
    """What `mlbench --help` prints: at most 80 columns, so that it needs no wrapping."""
    lines = [
        "Usage: mlbench COMMAND [OPTIONS] [ARGUMENTS]",
        "",
        "Run distributed-training benchmarks on this machine or on a cluster, and bring",
        "back results that can be checked.",
    ]
    for panel, commands in PANELS.items():
        lines += ["", f"{panel}:", *(f"  {name:<18} {command.help}" for name, command in commands.items())]
    lines += [
        "",
        "Options:",
        "  --version          Print the version",
        "  -h, --help         Print this text; after a command, that command's options",
        "  --install-completion, --show-completion",
        "                     Set up completion for this shell, or print its script",
        "",
        "Exit codes:",
        *(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()),
        "",
        "Start with: mlbench tasks, then mlbench run NAME 1 2 --task TASK",
    ]
    return "\n".join(lines) + "\n"
