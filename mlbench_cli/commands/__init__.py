"""The table of commands: the module of each, and its line in `mlbench --help` or `mlbench help TOPIC`.

A new command is a file beside this one and a line in PANELS. Its function (or `typer.Typer`, for one with
sub-commands) is imported only when the command runs; it returns None or an exit code, and raises MlbenchError.
This module is imported by `mlbench --help`: standard library only.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Command(NamedTuple):
    """The module and function of a command, and its one-line help."""

    module: str
    attribute: str
    help: str


PANELS: dict[str, dict[str, Command]] = {
    "Runs": {
        "run": Command("mlbench_cli.commands.run", "run", "Run a benchmark with one or more worker counts"),
        "status": Command("mlbench_cli.commands.status", "status", "Show all runs, or the workers and metrics of one"),
        "logs": Command("mlbench_cli.commands.logs", "logs", "Print the logs of a run"),
        "wait": Command("mlbench_cli.commands.wait", "wait", "Wait for a run to end, then exit with its exit code"),
        "cancel": Command("mlbench_cli.commands.cancel", "cancel", "Stop a run and keep partial results"),
        "delete": Command("mlbench_cli.commands.delete", "delete", "Delete a run and its results"),
    },
    "Results": {
        "report": Command("mlbench_cli.commands.report", "report", "Write a report about runs (HTML, Markdown)"),
        "compare": Command("mlbench_cli.commands.compare", "compare", "Compare results"),
        "verify": Command("mlbench_cli.commands.verify", "verify", "Verify archives and their signatures; sign them"),
        "serve": Command("mlbench_cli.commands.serve", "serve", "Start the dashboard and REST API"),
        "download": Command("mlbench_cli.commands.download", "download", "Write the archive of a run to a zip file"),
        "charts": Command("mlbench_cli.commands.charts", "charts", "Draw charts of finished runs"),
        "export": Command("mlbench_cli.commands.export", "export", "Export results to CSV, Parquet, MLflow, W&B"),
        "gate": Command("mlbench_cli.commands.gate", "gate", "Check results against a baseline in CI"),
        "reproduce": Command("mlbench_cli.commands.reproduce", "reproduce", "Run a result again and compare it"),
        "site": Command("mlbench_cli.commands.site", "site", "Build a results site that readers can verify"),
        "predict": Command(
            "mlbench_cli.commands.predict", "predict_command", "Predict time and price with other workers, networks"
        ),
        "get-dashboard-url": Command(
            "mlbench_cli.commands.serve", "get_dashboard_url", "Print the URL of the running dashboard"
        ),
    },
    "Clusters": {
        "create-cluster": Command(
            "mlbench_cli.commands.create_cluster", "create_cluster", "Create a cluster on KIND, GKE, EKS or AKS"
        ),
        "attach-cluster": Command(
            "mlbench_cli.commands.attach_cluster", "attach_cluster", "Use an existing Kubernetes cluster"
        ),
        "attach-slurm": Command("mlbench_cli.commands.attach_slurm", "attach_slurm", "Use an existing Slurm cluster"),
        "attach-hosts": Command("mlbench_cli.commands.attach_hosts", "attach_hosts", "Use a list of hosts over ssh"),
        "list-clusters": Command("mlbench_cli.commands.list_clusters", "list_clusters", "List clusters"),
        "set-cluster": Command("mlbench_cli.commands.set_cluster", "set_cluster", "Set the default cluster"),
        "certify": Command("mlbench_cli.commands.certify", "certify", "Find the nodes of a cluster that must go back"),
        "delete-cluster": Command(
            "mlbench_cli.commands.delete_cluster",
            "delete_cluster",
            "Delete a cluster and everything that belongs to it",
        ),
        "gc": Command("mlbench_cli.commands.gc", "gc", "Delete expired and orphaned clusters"),
        "images": Command("mlbench_cli.commands.images", "images", "Show or push task images"),
    },
    "Settings": {
        "tasks": Command("mlbench_cli.commands.tasks", "tasks", "List tasks, or show the parameters of one"),
        "doctor": Command("mlbench_cli.commands.doctor", "doctor", "Check this machine for what runs need"),
        "methods": Command("mlbench_cli.commands.methods", "methods", "List communication methods, or explain one"),
        "data": Command("mlbench_cli.commands.data", "data", "Prepare the data sets of a task"),
        "help": Command("mlbench_cli.commands.help", "show_help", "Show help for a topic or a command"),
    },
}

# `mlbench --help` lists these; `mlbench help TOPIC` lists the rest. First the ten commands of MLBench.
FIRST = (
    *("create-cluster", "run", "status", "download", "charts", "delete", "delete-cluster"),
    *("list-clusters", "set-cluster", "get-dashboard-url"),
)
EVERYDAY = (
    *("logs", "wait", "cancel", "compare", "gate", "verify", "report", "serve"),
    *("certify", "doctor", "tasks", "methods"),
)
# Words after `mlbench help` that are not a command, and what they show.
TOPICS = {
    "runs": "start, follow and stop runs",
    "results": "verify, compare, report, export",
    "clusters": "create, attach and delete clusters",
    "settings": "tasks, methods, data sets",
    "defaults": "defaults from config file and environment",
    "run-settings": "rarely needed settings of mlbench run",
    "exit-codes": "exit codes of all commands",
}

EXIT_CODES = {
    0: "success",
    1: "internal error",
    2: "invalid command line, spec file or configuration",
    3: "missing credentials or permission, or unproven origin",
    4: "cluster, run or file not found",
    5: "quota exceeded or no capacity",
    6: "workers never started",
    7: "task failed, gate failed, or --require-goal not met",
    8: "done, but clean-up or archive is incomplete",
    9: "cannot tell: not enough evidence",
    10: "cluster or host unreachable",
    124: "timeout",
    130: "interrupted (SIGINT)",
    141: "nobody reads the output (SIGPIPE)",
    143: "terminated (SIGTERM)",
}


def find(name: str) -> Command | None:
    """The command of that name."""
    return next((commands[name] for commands in PANELS.values() if name in commands), None)


def names() -> list[str]:
    """The names of all commands, in the order of the panels."""
    return [name for commands in PANELS.values() for name in commands]


def help_text(topic: str | None = None) -> str:
    """The text of `mlbench --help`, or of `mlbench help TOPIC`; at most 80 columns wide.

    Raises KeyError for a topic that TOPICS does not have.
    """
    if topic == "exit-codes":
        return "\n".join(("Exit codes:", *(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()))) + "\n"
    if topic is not None:
        panel = {name.lower(): entries for name, entries in PANELS.items()}[topic]
        lines = ["Usage: mlbench COMMAND [OPTIONS] [ARGUMENTS]", "", f"{topic.capitalize()}:", *_rows(panel)]
        return "\n".join([*lines, "", "Options of a command: mlbench COMMAND --help"]) + "\n"
    lines = [
        "Usage: mlbench COMMAND [OPTIONS] [ARGUMENTS]",
        "",
        "Create a GPU cluster, run distributed-training benchmarks on it or on this",
        "machine, and get results that others can verify.",
        "",
        "Commands:",
        *_rows(_named(FIRST)),
        "",
        "Follow runs, compare and check results:",
        *_rows(_named(EVERYDAY)),
        "",
        "More commands, by topic:",
        *(f"  mlbench help {name:<13} {text}" for name, text in TOPICS.items()),
        "",
        "Options: --version, --help (after a command: its options), --install-completion",
        "",
        "Get started:",
        "  mlbench run first 1 2 --task digits_resnet --light    on this machine",
        "  mlbench run big 2 --task allreduce --create kind      on a new cluster",
    ]
    return "\n".join(lines) + "\n"


def _named(names: Iterable[str]) -> dict[str, Command]:
    return {name: command for name in names if (command := find(name)) is not None}


def _rows(entries: Mapping[str, Command]) -> list[str]:
    return [f"  {name:<18} {command.help}" for name, command in entries.items()]
