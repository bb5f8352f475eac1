"""The key of comparable runs, used by series, comparisons and gates.

Two runs belong to one series only if their keys are equal. A fact that an archive does not have (old ones lack
provenance) is None, "unknown", which is never equal to a known value. Facts come from run.json (spec, provenance), from
what the ranks reported (environment.json), and from result.json; `_Evidence` is the one place that knows where.

Every field of a spec is in the key unless NEUTRAL lists it with the reason: fields that have no fact of their own are
in `settings`, so that an option added later keeps runs apart without a change here.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import msgspec

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.methods import OWN, is_command, method_of
from mlbench_cli.model.network import network_phrase
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.results.archive.conditions import Conditions, find_loader_variables
from mlbench_cli.results.archive.documents import LABELS
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.text import counted, shorten

UNKNOWN = "unknown"
WORKERS = "workers"
CONDITIONS = "conditions"
# Words of settings that people vary to see what they change; a gate still needs --across for them.
CHOICES = frozenset(
    (
        WORKERS,
        "backend",
        "device",
        "processes",
        "gpus",
        "cpus",
        "parameters",
        "network",
        "method",
        "settings",
        "division",
    )
)
_MAX_TEXT = 150
_MAX_RATE_RATIO = 1.5
_MIN_TRIP_SECONDS = 2e-4
_OPTIONS = "kubernetes."
_FRAMEWORKS = ("torch", "tensorflow", "jax")
_CLOUDS = ("gke/", "eks/", "aks/")  # whose kinds name a machine type that is the same everywhere
# Fields of a spec that do not change the measurement, and why.
NEUTRAL = {
    "name": "a label",
    "cluster": "its kind is a fact, with the name where the kind does not say which machines it has",
    "anonymous": "what the archive leaves out",
    "share_machine": "a condition, shown with the figures",
    "workers": "the axis of a chart; every presenter compares it separately",
    "seed": "repeats have different seeds",
    "timeout": "a deadline",
    "absent_seconds": "a deadline",
    "nodes": "their kind is a fact",
    "price": "known about the cluster, not used by the run",
    "data_dir": "where the data are; which data they are is the fact `data`",
    "task_path": "where the code is; which code it is is the fact `code`",
    "include_files": "where the code is; which code it is is the fact `code`",
    "kubernetes.namespace": "where objects are kept",
    "kubernetes.tolerations": "which nodes may be used; the machine is a fact",
    "kubernetes.pull_secret": "a credential",
    "kubernetes.queue": "who decides when the run starts",
    "kubernetes.start_timeout": "a deadline",
    "kubernetes.keep_seconds": "after the run",
    "kubernetes.collect": "after the run",
    "kubernetes.registry": "where the image comes from; its digest is a fact",
    "kubernetes.provisioning_class": "how machines are booked",
}
# Fields of a spec that are separate facts in the key.
_OWN_FACTS = frozenset(
    (
        *("task", "backend", "device", "preset", "cluster_kind", "processes_per_worker", "gpus_per_worker"),
        *("cpus", "image", "argv", "template", "functional_only", "parameters", "network", "method"),
        "kubernetes",
    )
)
# The text of a setting is left out where the spec has its default; a list and a tuple are the same.
_DEFAULTS = {
    **{item.name: item.default for item in msgspec.structs.fields(RunSpec)},
    **{f"{_OPTIONS}{item.name}": item.default for item in msgspec.structs.fields(KubernetesOptions)},
}


def _fact(word: str, name: str, *, reported: bool = False) -> Any:
    """A field of ComparisonKey: its word for `--across`, its name in a sentence.

    `reported`: only known if the run reached its training.
    """
    return field(metadata={"word": word, "name": name, "reported": reported})


@dataclass(frozen=True)
class Difference:
    """One difference between two runs, in plain words. `word` is the argument of `--across`."""

    word: str
    name: str
    a: str
    b: str

    @property
    def phrase(self) -> str:
        """ "The machines differ: Intel Xeon, 2 cores and unknown."."""
        return f"The {self.name} differ: {self.a} and {self.b}."


@dataclass(frozen=True)
class ComparisonKey:
    """Everything that makes times comparable, except the number of workers (a chart's axis). None: unknown."""

    task: str = _fact("task", "tasks")
    backend: str = _fact("backend", "backends")
    device: str = _fact("device", "devices")
    preset: str = _fact("preset", "presets")
    cluster: str | None = _fact("cluster", "kinds of cluster")
    machine: str | None = _fact("machine", "machines")
    processes_per_worker: int = _fact("processes", "numbers of processes per worker")
    gpus_per_worker: int = _fact("gpus", "numbers of GPUs per worker")
    cpus: float | None = _fact("cpus", "CPUs per rank")
    image: str | None = _fact("image", "images")
    code: str | None = _fact("code", "digests of the code")
    method_code: str | None = _fact("code", "digests of the method's code")
    framework: str | None = _fact("framework", "versions of the framework", reported=True)
    command: str = _fact("command", "commands")
    label: str = _fact("label", "labels")
    parameters: tuple[tuple[str, str], ...] = _fact("parameters", "parameters")
    goal: str | None = _fact("goal", "goals", reported=True)
    metric: str | None = _fact("goal", "metrics of the goal", reported=True)
    budget: str | None = _fact("budget", "times to spend", reported=True)
    network: str = _fact("network", "networks")
    method: str = _fact("method", "methods")
    settings: tuple[tuple[str, str], ...] = _fact("settings", "settings")
    data: str | None = _fact("data", "data", reported=True)
    synthetic: str | None = _fact("data", "kinds of data", reported=True)
    division: str | None = _fact("division", "divisions", reported=True)
    measure: str = _fact("measure", "measures")
    judge: int = _fact("judge", "versions of the judge")
    interruptions: str = _fact("faults", "interruptions")
    libraries: str = _fact("libraries", "search paths of libraries and modules")

    def differences(self, other: "ComparisonKey") -> tuple[Difference, ...]:
        """All differences between the two, in field order, with individual parameters."""
        found: list[Difference] = []
        for item in fields(self):
            a, b = getattr(self, item.name), getattr(other, item.name)
            if item.name == "method_code" and self.method.split()[:1] != other.method.split()[:1]:
                continue  # the code of two methods differs
            if item.name in _MAPPINGS:
                found += _entry_differences(item.metadata["word"], dict(a), dict(b))
            elif a != b:
                found.append(
                    Difference(item.metadata["word"], item.metadata["name"], _text(a) or "none", _text(b) or "none")
                )
        return tuple(found)

    def covers(self, other: "ComparisonKey") -> bool:
        """Whether `other`, of a run that failed before reporting everything, agrees as far as known."""
        for item in fields(self):
            mine, its = getattr(self, item.name), getattr(other, item.name)
            silent = its is None and (item.metadata["reported"] or item.name == "cpus")
            if item.name != "measure" and not silent and mine != its:
                return False
        return True

    def facts(self) -> dict[str, str]:
        """Every fact as a text, in the order of a label; a parameter X is the fact "parameter X"."""
        found: dict[str, str] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _MAPPINGS:
                found |= {f"{_MAPPINGS[item.name]} {name}": text for name, text in value}
            elif value is None and item.metadata["reported"]:
                found[item.name] = ""
            else:
                found[item.name] = _text(value)
        return found


# Facts that have several entries, and the word before the name of each.
_MAPPINGS = {"parameters": "parameter", "settings": "setting"}
# Every word of `--across`, besides those that are not part of the key.
WORDS = (WORKERS, CONDITIONS, *dict.fromkeys(item.metadata["word"] for item in fields(ComparisonKey)))


def check_words(words: Collection[str]) -> frozenset[str]:
    """The words of `--across`. Raises UsageError that names a wrong one."""
    for word in words:
        if word not in WORDS:
            near = did_you_mean(word, WORDS)
            raise UsageError(f'--across "{word[:60]}" is not one of {", ".join(WORDS)}.{near}')
    return frozenset(words)


def _parameters(spec: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    values = spec.get("parameters") or {}
    return tuple((name, _parameter(value)) for name, value in sorted(values.items()))


def key_of(archive: Archive) -> ComparisonKey:
    """The key of a verified archive."""
    found, spec, result = _Evidence(archive), archive.run["spec"], archive.result
    whole_run = result["task_seconds"]["wall"] is None and not result["timings"]
    goal = result["goal"]
    nothing = None if whole_run else ""
    command = " ".join(map(str, spec.get("template") or spec.get("argv") or ()))
    return ComparisonKey(
        task=str(spec["task"]),
        backend=str(spec["backend"]),
        device=str(spec.get("device", "cpu")),
        preset=str(spec["preset"]),
        cluster=found.cluster(),
        machine=found.machine(),
        processes_per_worker=int(spec.get("processes_per_worker", 1)),
        gpus_per_worker=int(spec.get("gpus_per_worker", 0)),
        cpus=found.cpus_per_rank(),
        image=found.image(),
        code=found.code(),
        method_code=found.method_code(),
        framework=found.framework(),
        command=_shorten(command) if is_command(spec) else "",
        label="functional only" if spec.get("functional_only") else "",
        parameters=_parameters(spec),
        goal=goal["wording"] if goal else nothing,
        metric=goal["metric"] if goal else nothing,
        budget=nothing if result["budget_seconds"] is None else f"{result['budget_seconds']:g}",
        data=_data_text(result) or nothing,
        network=_network(spec),
        method=method_of(spec),
        settings=tuple(_settings(spec)),
        synthetic="synthetic data" if result["synthetic"] else nothing,
        division=None if whole_run else result["division"]["word"] or "none",
        measure="whole run" if whole_run else "",
        judge=int(result["judge"]),
        interruptions=found.interruptions(),
        libraries=found.libraries(),
    )


def _settings(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings in the spec beyond the other facts, without defaults, including fields unknown to this version."""
    options = _mapping(spec.get("kubernetes"))
    given = {**spec, **{f"{_OPTIONS}{name}": value for name, value in options.items()}}
    for name, value in sorted(given.items()):
        is_said = name in NEUTRAL or name in _OWN_FACTS or name == "spec_version"
        # An empty list or mapping is the same as none: the spec's defaults are made by factories.
        if not is_said and value not in (None, _DEFAULTS.get(name)) and value != [] and value != {}:
            yield name, _shorten(_parameter(value))


def _shorten(text: str, limit: int = 80) -> str:
    """A text of at most `limit` characters; texts that differ stay different."""
    return text if len(text) <= limit else f"{shorten(text, limit - 10)} ({_digest(text)})"


def _network(spec: Mapping[str, Any]) -> str:
    """The network that was asked for; empty if none was."""
    return str(spec.get("network") or "")


def find_network_difference(a: Archive, b: Archive) -> Difference | None:
    """How the measured networks of two runs differ, if neither was shaped and each joins several network stacks.

    Figures of a probe are noisy: rates differ from a factor of 1.5 on, round trips from a factor of 2 and 0.2 ms on.
    """
    one, other = (_mapping(archive.result.get("network")) for archive in (a, b))
    if not one or not other or one["asked"] or other["asked"] or 1 in (one["networks"], other["networks"]):
        return None
    rates = [(summary["together_bits_per_second"] or summary["alone_bits_per_second"]) for summary in (one, other)]
    trips = [summary["rtt_seconds"] for summary in (one, other)]
    apart = None not in rates and max(rates) > _MAX_RATE_RATIO * min(rates)
    if None not in trips:
        apart = apart or (max(trips) > 2 * min(trips) and max(trips) - min(trips) > _MIN_TRIP_SECONDS)
    return Difference("network", "measured networks", network_phrase(one), network_phrase(other)) if apart else None


def conditions_of(archive: Archive) -> Conditions:
    """The conditions that the archive's own result states; unknown if it is silent."""
    stated = archive.result.get("conditions")
    return Conditions() if stated is None else Conditions.from_dict(stated)


def describe_condition_difference(one: Iterable[Archive], other: Iterable[Archive]) -> str | None:
    """The rule about conditions: both sides must have the same labels. A sentence about the difference; None without
    one."""
    a, b = ({label for archive in side for label in conditions_of(archive).labels} for side in (one, other))
    if a == b:
        return None
    texts = [
        ", ".join(label for label in LABELS if label in side).replace("_", "-") or "no condition" for side in (a, b)
    ]
    return f"The conditions differ: {texts[0]} and {texts[1]}."


class _Evidence:
    """Where an archive's facts are. Provenance and reports are foreign: whatever is missing or malformed is None."""

    def __init__(self, archive: Archive) -> None:
        self._spec: Mapping[str, Any] = archive.run["spec"]
        self._name = archive.run.get("name")
        self._result = archive.result
        self._conditions = conditions_of(archive)
        self._provenance = _mapping(archive.run.get("provenance"))
        self._ranks = [_mapping(rank) for rank in _mapping(archive.environment.get("ranks")).values()]

    @property
    def is_local(self) -> bool:
        return bool(self._spec.get("engine") == "local")

    def cluster(self) -> str:
        """Provider and machine type of a cloud. All other clusters differ by their names: a partition or a list of
        hosts of that kind exists in more than one place."""
        kind = self._spec.get("cluster_kind")
        if self.is_local:
            return "local"
        if kind and str(kind).startswith(_CLOUDS) and "/" in str(kind):
            return str(kind)
        return f"{kind or 'cluster'} {self._spec.get('cluster')}"

    def interruptions(self) -> str:
        """ "2 restarts, 1 of 2 ranks at the end": restarts and lost ranks; empty if there were none."""
        faults = _mapping(self._result.get("faults"))
        restarts = max(0, int(faults.get("attempts") or 1) - 1)
        restarts += sum(int(_mapping(state).get("restarts") or 0) for state in self._result.get("worker_states") or ())
        ranks, whole = int(faults.get("ranks") or self._result["world_size"]), int(self._result["world_size"])
        found = [counted(restarts, "restart")] if restarts else []
        found += [counted(int(faults["injected"]), "fault")] if faults.get("injected") else []
        return ", ".join([*found, *([f"{ranks} of {whole} ranks at the end"] if ranks != whole else [])])

    def libraries(self) -> str:
        """The variables that load foreign libraries and modules into the ranks, such as LD_PRELOAD."""
        found = find_loader_variables(self._provenance, self._ranks)
        if not found and (preloaded := self._conditions.preloaded) is not None:
            return _shorten(preloaded.reason)  # of a command on a cluster, as its agents found it
        return _shorten(" ".join(f"{name}={value}" for name, value in found.items()))

    def machine(self) -> str | None:
        """ "Intel Xeon, 2 cores": the machines of all ranks, each once."""
        own = _machine_text(_mapping(self._provenance.get("machine")))
        if own:
            return own
        reported = sorted({text for rank in self._ranks if (text := _machine_text(rank))})
        return _shorten(" + ".join(reported), _MAX_TEXT) if reported else None

    def cpus_per_rank(self) -> float | None:
        """Resources that a rank reported take precedence over the request."""
        for rank in self._ranks[:1]:
            for name in ("env", "environ", "environment", "variables"):
                given = str(_mapping(rank.get(name)).get("OMP_NUM_THREADS", ""))
                if given.isdecimal() and given.isascii() and len(given) < 6:
                    return float(given)
        asked = self._spec.get("cpus")
        return None if asked is None else float(asked) / int(self._spec.get("processes_per_worker", 1))

    def image(self) -> str | None:
        """The image's digest as the kubelet reported it; empty on this machine, which has none."""
        if self.is_local:
            return ""
        states = [_mapping(state) for state in self._result.get("worker_states") or ()]
        digests = sorted({str(state["image_digest"]) for state in states if state.get("image_digest")})
        if digests:
            return _shorten(" + ".join(digests), _MAX_TEXT)
        asked = self._spec.get("image")
        return f"{_shorten(asked, _MAX_TEXT)} of unknown digest" if asked else None

    def code(self) -> str | None:
        """The digest of the code of a task or of a user's command, with the commit of the folder that it ran in.

        A command of unknown code differs from all but those of its own experiment.
        """
        digest = _mapping(self._provenance.get("code")).get("digest")
        digest = digest or next((rank["code_digest"] for rank in self._ranks if rank.get("code_digest")), None)
        is_own = is_command(self._spec)
        if digest and not is_own:
            return str(digest)[:16]
        source = _mapping(self._provenance.get("source"))
        commit = source.get("commit")
        state = f"commit {str(commit)[:12]}{', modified' if source.get('modified') else ''}" if commit else ""
        named = _mapping(self._provenance.get("command")).get("digest")
        if named:
            return f"{str(named)[:16]}{f' ({state})' if state else ''}"
        if not is_own:
            return state or None
        if not self.is_local and any(
            _mapping(item).get("image_digest") for item in self._result.get("worker_states") or ()
        ):
            return "in the image"
        experiment = self._provenance.get("experiment") or name_experiment(str(self._name))
        suffix = f", {state}" if state else ""
        return f"{UNKNOWN} (the command of {shorten(str(experiment), 60)} names no file of its code){suffix}"

    def method_code(self) -> str | None:
        """The digest of what the method adds to the code of a task."""
        code = _mapping(self._provenance.get("code"))
        found = code.get("method_digest") or next((str(rank.get("method_digest") or "") for rank in self._ranks), "")
        return str(found)[:16]

    def framework(self) -> str | None:
        """As rank 0 reported it; of a command that reports none, those that its environment has."""
        for rank in self._ranks[:1]:
            version = rank.get("framework_version") or rank.get("version")
            if rank.get("framework") and version:
                return _shorten(f"{rank['framework']} {version}", 60)
        packages = _mapping(self._provenance.get("packages")) if is_command(self._spec) else {}
        found = [f"{name} {packages[name]}" for name in _FRAMEWORKS if name in packages]
        return _shorten(", ".join(found), 60) or None


def name_experiment(run: str) -> str:
    """The experiment of a run by its name: "a" of "a-2-r1"."""
    return re.sub(r"-\d+(-r\d+)?$", "", run)


class Title(NamedTuple):
    """What a run is for people: its task; of a user's command, its experiment and the command."""

    name: str
    command: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.command}" if self.command else self.name


def title_of(archive: Archive) -> Title:
    """The title of a verified archive."""
    spec = archive.run["spec"]
    if not is_command(spec):
        return Title(str(archive.result["task"]))
    recorded = str(_mapping(archive.run.get("provenance")).get("experiment") or "")  # "name d23c83"
    experiment = recorded.rpartition(" ")[0] or name_experiment(str(archive.run["name"]))
    return Title(shorten(experiment, 60), shorten(shlex.join(map(str, spec.get("argv") or ())), 80))


def describe(name: str, value: str) -> str:
    """A fact in a few words, empty if there is nothing to say."""
    if not value:
        return ""
    if value == UNKNOWN:
        return f"{name} unknown"
    if name.startswith("parameter "):
        return f"{name.removeprefix('parameter ')}={_shorten(value, 40)}"
    if name.startswith("setting "):
        return "" if name == "setting goal" else f"{name.removeprefix('setting ')}={_shorten(value, 40)}"
    words = {
        "method": f"{value} method" if value == OWN else value,
        "preset": f"preset {value}" if value != "custom" else "",
        "cluster": "on this machine" if value == "local" else value,
        "code": f"code {value}",
        "method_code": f"code of the method {value}",
        "image": f"image {_shorten(value, 40)}",
        "data": f"data {value}",
        "division": f"{value} division" if value != "none" else "no division",
        "judge": f"judge {value}",
        "processes_per_worker": f"{value} process{'' if value == '1' else 'es'} per worker",
        "gpus_per_worker": f"{value} GPU{'' if value == '1' else 's'} per worker",
        "cpus": f"{value} CPU{'' if value == '1' else 's'} per rank",
        "goal": f"goal {value}",
        "metric": "",
        "budget": f"{value} s to spend",
    }
    return words.get(name, value)


def _machine_text(facts: Mapping[str, Any]) -> str | None:
    """From `cpu`, `cores`, `cpu_quota` and `gpus` (or `device_name`) of a machine; None if the processor is unknown."""
    cpu, gpus = facts.get("cpu"), facts.get("gpus") or facts.get("device_name") or ()
    names = [str(gpus)] if isinstance(gpus, str) else [str(gpu) for gpu in gpus]
    if not cpu:
        return None
    words = [str(cpu)]
    if facts.get("cores"):
        words.append(f"{facts['cores']} cores")
    if facts.get("cpu_quota"):
        words.append(f"quota of {facts['cpu_quota']:g} CPUs")
    words += [f"{names.count(name)} {name}" for name in dict.fromkeys(names) if name != cpu]
    return _shorten(", ".join(words), _MAX_TEXT)


def _entry_differences(word: str, a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted({*a, *b}):
        if a.get(name) != b.get(name):
            yield Difference(word, f"values of {name}", a.get(name, "none"), b.get(name, "none"))


def _data_text(result: Mapping[str, Any]) -> str:
    """Name of the data; with a part of their digest if they are not known to be the official ones."""
    name, identity = str(result["data"] or ""), _mapping(result.get("data_identity"))
    if result["synthetic"] or not identity or identity.get("official"):
        return name
    word = "not the official data" if identity.get("official") is False else "not known to be official"
    digest = str(identity.get("digest") or "").removeprefix("sha256:")[:8]
    return f"{name} ({word}{f', {digest}' if digest else ''})"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _parameter(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and len(value) > 6:
        return f"{len(value)} from {value[0]} to {value[-1]} ({_digest(value)})"
    return value if isinstance(value, str) else json.dumps(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:6]


def _text(value: Any) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:g}" if isinstance(value, float) else str(value)
