"""The arrows of the house: who may import whom, and what a command must not load."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mlbench_cli", "providers", "templates", "task_images")

# What every module of the tool may know: words and plain data, no behavior of another part.
BASE = (
    *(
        "mlbench_cli.errors",
        "mlbench_cli.model.run",
        "mlbench_cli.model.goals",
        "mlbench_cli.util.times",
        "mlbench_cli.util.files",
    ),
    *(
        "mlbench_cli.config.settings",
        "mlbench_cli.model.spec",
        "mlbench_cli.tasks.catalog",
        "mlbench_cli.storage.store",
        "mlbench_cli.storage.run_folder",
    ),
    *(
        "mlbench_cli.config.extras",
        "mlbench_cli.isolation",
        "mlbench_cli.storage.queue_folder",
        "mlbench_cli.model.cluster_details",
    ),
    *(
        *("mlbench_cli.model.network", "mlbench_cli.model.faults"),
        "mlbench_cli.model.methods",
        "mlbench_cli.model.silence",
        "mlbench_cli.util.yaml_text",
        *("mlbench_cli.util.json_text", "mlbench_cli.util.csv_text"),
        "mlbench_cli.util.text",
        "mlbench_cli.tasks.images",
        "mlbench_cli.kube.gpudirect",
    ),
    "mlbench_cli.tasks.task_files",
    *("task_images.contract", "task_images.harness.cores", "task_images.harness.settings"),
    *("task_images.comm.methods", "task_images.comm.presets", "task_images.comm.plans"),  # tables, without torch
    "task_images.comm.door",
)
# The longest prefix counts. A part may import itself and what is named here.
ALLOWED: dict[str, tuple[str, ...]] = {
    # What is inside has arrows of its own.
    **dict.fromkeys(
        (f"mlbench_cli.{part}" for part in ("model", "storage", "config", "tasks", "clusters", "util")), ()
    ),
    "mlbench_cli.__init__": ("mlbench_cli.isolation",),
    "mlbench_cli.isolation": (),
    "mlbench_cli.util.masking": ("mlbench_cli.errors",),
    # What the ranks say of code and machine, the tool records: one function each, standard library only.
    "mlbench_cli.tasks.provenance": (
        *BASE,
        "mlbench_cli.agent.processes",
        "mlbench_cli.util.masking",
        "mlbench_cli.__init__",
        "task_images.harness.environment",
    ),
    "mlbench_cli.__main__": (
        *("mlbench_cli.app", "mlbench_cli.commands.__init__", "mlbench_cli.isolation", "mlbench_cli.__init__"),
        *("mlbench_cli.boundary", "mlbench_cli.commands._status", "mlbench_cli.util.commit"),
    ),
    "mlbench_cli.boundary": ("mlbench_cli.console", "mlbench_cli.errors"),
    "mlbench_cli.app": (
        *("mlbench_cli.commands.__init__", "mlbench_cli.console", "mlbench_cli.errors", "mlbench_cli.__init__"),
        *("mlbench_cli.boundary", "mlbench_cli.commands._values", "mlbench_cli.util.commit", "mlbench_cli.util.gone"),
    ),
    "mlbench_cli.errors": (),
    "mlbench_cli.config.extras": (),
    "mlbench_cli.util.times": (),
    "mlbench_cli.util.files": (),
    "mlbench_cli.model.goals": (),
    "mlbench_cli.model.run": ("mlbench_cli.errors", "mlbench_cli.model.spec"),  # spec: its type only
    "mlbench_cli.storage.run_folder": ("mlbench_cli.errors", "mlbench_cli.util.files", "mlbench_cli.model.run"),
    "mlbench_cli.config.settings": ("mlbench_cli.errors", "mlbench_cli.util.durations"),
    "mlbench_cli.model.silence": (
        *("mlbench_cli.errors", "mlbench_cli.config.settings", "mlbench_cli.model.run", "mlbench_cli.util.text"),
    ),
    "mlbench_cli.model.network": ("mlbench_cli.errors",),
    "mlbench_cli.model.faults": ("mlbench_cli.errors", "mlbench_cli.model.network", "mlbench_cli.model.spec"),
    "mlbench_cli.model.methods": ("task_images.comm.presets",),
    "mlbench_cli.model.spec": ("mlbench_cli.errors", "mlbench_cli.model.network"),
    "mlbench_cli.util.yaml_text": ("mlbench_cli.errors",),
    "mlbench_cli.util.json_text": (),
    "mlbench_cli.util.csv_text": (),
    "mlbench_cli.tasks.catalog": (
        *("mlbench_cli.errors", "mlbench_cli.model.goals", "mlbench_cli.util.sizes", "mlbench_cli.tasks.datafiles"),
        *("mlbench_cli.util.yaml_text", "task_images.contract"),
        *("mlbench_cli.tasks.task_files", "mlbench_cli.tasks.task_sources"),
        "task_images.harness.settings",  # how parameters are declared, without torch
    ),
    "mlbench_cli.tasks.images": (),
    "mlbench_cli.kube.gpudirect": (),
    "mlbench_cli.tasks.registries": ("mlbench_cli.tasks.images",),
    "mlbench_cli.tasks.image_builds": (  # the tasks' folder is the context that images are built from
        *(*BASE, "mlbench_cli.tasks.registries", "mlbench_cli.__init__", "task_images.__init__"),
    ),
    "mlbench_cli.clusters.registry_login": (*BASE, "mlbench_cli.tasks.registries", "providers"),
    "mlbench_cli.tasks.task_files": ("mlbench_cli.errors", "mlbench_cli.util.yaml_text"),
    "mlbench_cli.tasks.task_sources": ("mlbench_cli.errors", "mlbench_cli.isolation"),
    "mlbench_cli.tasks.datafiles": ("mlbench_cli.errors",),
    "mlbench_cli.util.durations": ("mlbench_cli.errors",),
    "mlbench_cli.config.file": (
        *("mlbench_cli.util.durations", "mlbench_cli.errors", "mlbench_cli.util.files", "mlbench_cli.config.settings"),
        "mlbench_cli.util.text",
    ),
    "mlbench_cli.util.sizes": (),
    "mlbench_cli.storage.store_schema": (),
    "mlbench_cli.storage.store": (
        *("mlbench_cli.storage.store_schema",),
        *(
            "mlbench_cli.errors",
            "mlbench_cli.model.run",
            "mlbench_cli.config.settings",
            "mlbench_cli.model.spec",
            "mlbench_cli.util.times",
        ),
    ),
    "mlbench_cli.model.cluster_details": ("mlbench_cli.errors", "mlbench_cli.model.run"),
    "mlbench_cli.clusters.manage": (*BASE, "providers", "mlbench_cli.clusters.zone_failover"),
    "mlbench_cli.clusters.changes": (*BASE, "providers", "mlbench_cli.clusters.manage"),
    "mlbench_cli.clusters.zone_failover": (*BASE, "providers"),
    "mlbench_cli.clusters.first_day": ("mlbench_cli.errors", "mlbench_cli.util.times"),
    "mlbench_cli.util.text": (),
    "mlbench_cli.console.terminal": ("mlbench_cli.util.text",),
    "mlbench_cli.console.prompts": ("mlbench_cli.console.terminal", "mlbench_cli.util.text"),
    "mlbench_cli.console": (
        *("mlbench_cli.errors", "mlbench_cli.util.text", "mlbench_cli.console.terminal", "mlbench_cli.console.prompts"),
    ),
    "mlbench_cli.storage.queue_folder": (
        "mlbench_cli.agent.processes",
        "mlbench_cli.util.files",
        "mlbench_cli.model.run",
        "mlbench_cli.storage.run_folder",
        "mlbench_cli.util.times",
    ),
    "mlbench_cli.runs.matrix": (
        "mlbench_cli.errors",
        "mlbench_cli.tasks.catalog",
        "mlbench_cli.model.spec",
        "mlbench_cli.util.text",
    ),
    "mlbench_cli.runs.request": (
        *(
            "mlbench_cli.errors",
            "mlbench_cli.tasks.catalog",
            "mlbench_cli.util.durations",
            "mlbench_cli.util.gone",
            "mlbench_cli.runs.matrix",
        ),
        *("mlbench_cli.util.yaml_text", "mlbench_cli.util.text"),
    ),
    "mlbench_cli.runs.experiment": (
        *(*BASE, "mlbench_cli.runs.request", "mlbench_cli.runs.matrix", "mlbench_cli.runs.launch"),
    ),
    "mlbench_cli.runs.connect": (
        *BASE,
        "mlbench_cli.agent.lock",
        "mlbench_cli.engines",
        "mlbench_cli.kube.access",
        "providers",
    ),
    "mlbench_cli.runs.kubernetes_options": (*BASE, "mlbench_cli.util.masking", "mlbench_cli.runs.request"),
    "mlbench_cli.runs.preflight": BASE,
    **dict.fromkeys(("mlbench_cli.runs.experiment_file",), (*BASE, "mlbench_cli.runs")),
    **dict.fromkeys(
        ("mlbench_cli.runs.network_options", "mlbench_cli.runs.fault_options"),
        (
            *(*BASE, "mlbench_cli.runs.request", "mlbench_cli.util.durations"),
            "mlbench_cli.agent.storage",  # whether disks can be slowed
        ),
    ),
    "mlbench_cli.runs.launch": (
        *("mlbench_cli.runs.network_options", "mlbench_cli.runs.fault_options"),
        *(*BASE, "mlbench_cli.util.masking", "mlbench_cli.runs.request", "mlbench_cli.runs.kubernetes_options"),
        *("mlbench_cli.runs.preflight", "mlbench_cli.runs.methods", "mlbench_cli.__init__"),
        "mlbench_cli.agent.machine",  # which GPUs there are
    ),
    "mlbench_cli.runs.methods": (*BASE, "mlbench_cli.runs.request"),
    "mlbench_cli.runs.questions": (*BASE, "mlbench_cli.runs.request", "mlbench_cli.runs.launch"),
    "mlbench_cli.runs.wizard": (
        *(
            *BASE,
            "mlbench_cli.runs.questions",
            "mlbench_cli.runs.request",
            "mlbench_cli.runs.launch",
            "mlbench_cli.console",
        ),
    ),
    "mlbench_cli.kube": (*BASE, "mlbench_cli.engines.base"),
    # What a run does with a method is a table of axes and pure functions, which a prediction shares.
    "mlbench_cli.simulator": (
        *("mlbench_cli.errors", "mlbench_cli.model.goals", "mlbench_cli.model.network"),
        *("mlbench_cli.model.faults", "mlbench_cli.util.csv_text", "mlbench_cli.util.durations"),
        *(
            "task_images.comm.__init__",
            "task_images.comm.door",
            "task_images.comm.methods",
            "task_images.comm.plans",
            "task_images.comm.presets",
        ),
    ),
    "mlbench_cli.predict": (
        *("mlbench_cli.errors", "mlbench_cli.model.goals", "mlbench_cli.model.network", "mlbench_cli.simulator"),
        *("mlbench_cli.util.front", "task_images.comm.methods", "task_images.comm.presets"),
    ),
    # It runs on machines without the client: of the tool, only what is copied there.
    "mlbench_cli.agent": (
        "mlbench_cli.util.files",
        "mlbench_cli.isolation",
        *("mlbench_cli.model.network", "mlbench_cli.model.faults"),
        "task_images.harness.cores",
    ),
    "mlbench_cli.agent.channel": ("mlbench_cli.__init__", "mlbench_cli.errors", "mlbench_cli.agent"),
    "mlbench_cli.agent.network": (
        "mlbench_cli.__init__",
        "mlbench_cli.model.network",
        "mlbench_cli.agent",
        "task_images.harness",
    ),
    "mlbench_cli.engines": (*BASE, "mlbench_cli.agent", "mlbench_cli.kube", "templates", "mlbench_cli.__init__"),
    # The variables that a host file's environment may not set: names of secrets.
    "mlbench_cli.engines.hosts": (*BASE, "mlbench_cli.agent", "mlbench_cli.engines", "mlbench_cli.util.masking"),
    "mlbench_cli.results": (
        *(*BASE, "mlbench_cli.tasks.provenance", "mlbench_cli.engines.base", "mlbench_cli.util.front"),
        "mlbench_cli.__init__",
    ),
    "mlbench_cli.runs.recording": (*BASE, "mlbench_cli.runs", "mlbench_cli.results", "mlbench_cli.tasks.provenance"),
    "mlbench_cli.runs.hooks": (*BASE, "mlbench_cli.config.file", "mlbench_cli.runs.finished"),
    "mlbench_cli.runs.defaults": (*BASE, "mlbench_cli.config.file", "mlbench_cli.runs.request"),
    "mlbench_cli.runs": (
        *BASE,
        "mlbench_cli.agent.processes",
        "mlbench_cli.engines",
        "mlbench_cli.results",
        "mlbench_cli.__init__",
    ),
    "mlbench_cli.api": (
        *(*BASE, "mlbench_cli.runs", "mlbench_cli.results", "mlbench_cli.engines.base", "mlbench_cli.clusters.manage"),
        *("mlbench_cli.util.durations", "mlbench_cli.tasks.provenance", "mlbench_cli.__init__"),
        *("mlbench_cli.predict", "mlbench_cli.simulator", "task_images.comm.methods", "task_images.comm.presets"),
    ),
    "mlbench_cli.server": (
        *(*BASE, "mlbench_cli.api", "mlbench_cli.results", "mlbench_cli.runs.request", "mlbench_cli.util.masking"),
        *("mlbench_cli.util.durations", "mlbench_cli.__init__"),
    ),
    "mlbench_cli.commands": (
        # What an engine or a provider does is reached through runs and clusters, not past them.
        *(*BASE, "mlbench_cli.api", "mlbench_cli.clusters.manage", "mlbench_cli.config.file", "mlbench_cli.console"),
        "mlbench_cli.clusters.changes",
        "mlbench_cli.clusters.first_day",
        *(
            "mlbench_cli.util.durations",
            "mlbench_cli.model.network",
            "mlbench_cli.tasks.provenance",
            "mlbench_cli.__init__",
        ),
        *("mlbench_cli.tasks.registries", "mlbench_cli.tasks.image_builds", "mlbench_cli.clusters.registry_login"),
        *("mlbench_cli.runs", "mlbench_cli.results", "mlbench_cli.server", "mlbench_cli.simulator"),
        "mlbench_cli.predict",
        *(
            "mlbench_cli.engines.base",
            "mlbench_cli.agent.lock",
            "mlbench_cli.engines.kubernetes.engine",
        ),
        *("mlbench_cli.engines.hosts", "mlbench_cli.engines.slurm", "mlbench_cli.engines.machines"),  # attach-*
        "mlbench_cli.agent.channel",
        *("mlbench_cli.kube.access", "templates.__init__"),
        *("providers.registry", "providers.attached", "providers.base", "providers.checks", "providers.doctor"),
        *(
            "providers.gpu_probe",
            "providers.helm.install",
            "providers.lifecycle",
            "providers.operation_errors",
            "providers.operation_lock",
        ),
        *(
            "providers.pricing",
            "providers.pins",
            "providers.eks.doctor",
            "providers.gke.rights",
            "providers.aks.rights",
            "task_images.comm.door",
            "task_images.comm.methods",
            "task_images.comm.presets",
        ),
    ),
    "providers": (*BASE, "templates", "mlbench_cli.kube", "mlbench_cli.__init__"),
    "templates": ("mlbench_cli.errors",),
    "task_images": (),
}
# Nothing of runs: what a run is, is none of a provider's business.
FORBIDDEN = {
    "providers": ("mlbench_cli.model.spec", "mlbench_cli.tasks.catalog", "task_images"),
    "mlbench_cli.commands": ("mlbench_cli.app", "mlbench_cli.__main__"),
}
HEAVY = {"mlbench_cli": ("torch", "tensorflow"), "providers": ("torch", "tensorflow"), "templates": ("torch",)}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def modules() -> dict[str, Path]:
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {module_name(path): path for path in found}


def imports(name: str, path: Path, known: set[str]) -> Iterator[str]:
    """Every module that is imported anywhere in a file, also inside functions and for type checkers only."""
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{name} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known or f"{whole}.__init__" in known else str(node.module)


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    nodes = statements(ast.parse(path.read_text("utf-8")).body)
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """These and all inside of them; a fifth of what `ast.walk` goes through."""
    for node in nodes:
        yield node
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            yield from statements(getattr(node, name, ()))


def part_of(name: str) -> str:
    return max((part for part in ALLOWED if covers(part, name)), key=len)


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def own(imported: str, known: set[str]) -> str | None:
    """The project's module behind an imported name, with "__init__" for a package itself."""
    if imported.split(".")[0] not in PACKAGES:
        return None
    return imported if imported in known else f"{imported}.__init__"


def offenses(name: str, path: Path, known: set[str]) -> Iterator[str]:
    """The imports of a module that no arrow allows."""
    part = part_of(name)
    for imported in imports(name, path, known):
        target = own(imported, known)
        if imported.split(".")[0] in HEAVY.get(name.split(".")[0], ()):
            yield f"{name} imports {imported}"
        if target is None or covers(part, target):
            continue
        allowed = any(covers(prefix, target) for prefix in ALLOWED[part])
        if not allowed or any(covers(prefix, target) for prefix in FORBIDDEN.get(part, ())):
            yield f"{name} must not import {imported}"


@pytest.mark.group("imports")
def test_arrows() -> None:
    paths = modules()
    known = set(paths)
    assert not [offense for name, path in paths.items() for offense in offenses(name, path, known)]


def test_arrows_can_fail() -> None:
    assert part_of("mlbench_cli.engines.local.engine") == "mlbench_cli.engines"
    assert not any(covers(allowed, "mlbench_cli.results.archive.reader") for allowed in ALLOWED["mlbench_cli.engines"])
    for hidden in ("mlbench_cli.engines.kubernetes.logs", "mlbench_cli.kube.api", "providers.gke.api", "templates.x"):
        assert not any(covers(allowed, hidden) for allowed in ALLOWED["mlbench_cli.commands"])
    assert list(imports("x", Path(__file__), set(modules()))).count("subprocess") == 1


@pytest.mark.group("imports")
def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also not inside functions and not for type checkers only: a circle is hidden by these, not opened."""
    known = set(modules())
    arrows = {
        name: {target for item in imports(name, path, known) if (target := own(item, known))} - {name}
        for name, path in modules().items()
    }
    graphlib.TopologicalSorter(arrows).prepare()  # raises CycleError, whose message has the circle


def test_no_command_imports_another_command() -> None:
    """What commands share is below them, or in a module of theirs whose name begins with "_"."""
    prefix = "mlbench_cli.commands."
    commands = {name: path for name, path in modules().items() if name.startswith(prefix)}
    shared = {name for name in commands if name.startswith(f"{prefix}_")}
    for name, path in commands.items():
        others = set(imports(name, path, set(modules()))) & (commands.keys() - shared - {name})
        assert not others, f"{name} imports {others}"


# The API reads and changes runs, experiments and archives; these commands print what it returns.
THROUGH_API = (
    *("status", "logs", "wait", "cancel", "delete", "download", "discover", "compare", "charts", "report", "gate"),
    *("export", "_export_live", "baselines", "verify", "run", "_members", "_report", "_experiment_file"),
    *("_status", "reproduce"),
)
BELOW_API = (
    *(
        "mlbench_cli.storage.store",
        "mlbench_cli.runs.supervise",
        "mlbench_cli.runs.finalize",
        "mlbench_cli.runs.finished",
    ),
    *("mlbench_cli.runs.queue", "mlbench_cli.runs.removal", "mlbench_cli.runs.connect", "mlbench_cli.clusters.manage"),
    *("mlbench_cli.engines", "mlbench_cli.results.archive.pack", "mlbench_cli.results.archive.evidence"),
)


@pytest.mark.parametrize("command", THROUGH_API)
def test_what_runs_do_is_shown_through_the_api(command: str) -> None:
    found = list(imports(command, ROOT / "mlbench_cli" / "commands" / f"{command}.py", set(modules())))
    assert any(covers("mlbench_cli.api", item) for item in found)
    assert not [item for item in found if any(covers(below, item) for below in BELOW_API)]


@pytest.mark.parametrize("name", sorted(name for name in modules() if name.startswith("mlbench_cli.server.")))
def test_the_dashboard_knows_runs_by_the_api_alone(name: str) -> None:
    found = imports(name, modules()[name], set(modules()))
    assert not [item for item in found if any(covers(below, item) for below in BELOW_API)]


FOREIGN = {
    "torch",
    "boto3",
    "botocore",
    "google",
    "kubernetes",
    "pydantic",
    "requests",
    "matplotlib",
    "numpy",
    "jinja2",
}
FOREIGN |= {"rich"}
NETWORKING = ("http", "email", "ssl", "socket")  # only with --dashboard-url
PROBE = """
import sys
started = set(sys.modules)  # also what files .pth of the installation import
sys.argv = ["mlbench", *sys.argv[1:]]
from mlbench_cli.__main__ import main
assert main() == 0
print(*(set(sys.modules) - started), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (["--version"], {"typer", "sqlite3", "yaml", "inspect", "json", "pathlib", "re"}),
        (["--help"], {"typer", "sqlite3", "yaml", "inspect", "pathlib"}),
        (["status"], {"typer", "yaml", *NETWORKING}),
        (["status", "-o", "json"], {"yaml", *NETWORKING}),
        (["list-clusters"], {"yaml", "task_images", *NETWORKING}),
        (["tasks"], set()),
        (["set-cluster", "local"], {"yaml"}),
        (["config"], {"yaml"}),
        (["run", "x", "1", "--command", "true", "--dry-run"], set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_import_budget(command: list[str], more: set[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *command],
        env={"MLBENCH_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stderr.splitlines()[-1].split())
    assert "mlbench_cli" in loaded
    assert not {name for name in loaded if name.split(".")[0] in FOREIGN | more}


# A program or notebook imports the client first. What only some of its methods need is imported by these: views and
# statistics of results, engines, forecasts. Each dataclass costs about 1 ms.
CLIENT = (
    *("isolation", "errors", "api", "api.client", "api.experiments", "api.runs", "api.workspace", "runs.connect"),
    *("model.network", "model.run", "model.spec", "config.settings"),
    *("storage.run_folder", "storage.store", "storage.store_schema", "util.durations", "util.files", "util.text"),
    "util.times",
)


def test_the_client_loads_the_store_and_little_else() -> None:
    code = "import sys; from mlbench_cli.api import Client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = {name for name in done.stdout.split() if name.split(".")[0] in PACKAGES}
    packages = {name for name in own if f"{name}.__init__" in modules()} - {"mlbench_cli.api"}
    assert own - packages <= {f"mlbench_cli.{name}" for name in CLIENT}
