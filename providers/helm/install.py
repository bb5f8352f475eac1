"""Install a Helm chart with helm, after all checks that are possible before the cluster exists.

The release has its own namespace with the cluster's ownership label. A label on the release identifies chart and
values, so any machine sees whether it is up to date.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlbench_cli.errors import DeadlineError, MlbenchError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api, ApiError, ObjectNotFound
from mlbench_cli.model.cluster_details import HelmChartRecord
from mlbench_cli.model.run import Cluster
from providers.base import CLUSTER_TAG, Readiness, Resource, ResourceStatus, TransientError, ownership_tags
from providers.file_locks import inheritable_lock
from providers.helm import tool as program
from providers.helm import values as custom
from providers.helm.source import Chart, fetch_chart, parse_chart_reference
from providers.helm.tool import Helm, HelmCall

CONTENT = "mlbench-content"
WAIT_SECONDS = 600.0
GRACE_SECONDS = 60.0  # helm ends by itself shortly after its timeout
REMOVE_SECONDS = 300.0
UNFINISHED = ("pending-", "uninstalling")  # prefix of helm's statuses of running or interrupted operations


@dataclass(frozen=True)
class Installation:
    """A Helm chart with its values, ready to be installed. `values` override the chart's own."""

    chart: Chart
    customs: tuple[custom.CustomValue, ...]
    values: Mapping[str, Any]
    helm: Helm
    wait_seconds: float = WAIT_SECONDS  # until all of its objects are ready

    @property
    def namespace(self) -> str:
        """The namespace of the release: "mlbench-" and the chart's name."""
        return f"mlbench-{self.chart.name}"

    @property
    def content(self) -> str:
        """A digest of chart and values, short enough for a label."""
        text = json.dumps([self.chart.digest, self.values], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    @property
    def warnings(self) -> list[str]:
        """Warnings of the chart, and about values that it does not know."""
        chart = self.chart
        return [*chart.warnings, *custom.warn_about(self.customs, chart.values, chart.subcharts)]

    def record(self) -> HelmChartRecord:
        """For the cluster's record. Of custom values only the names are kept: they may be secrets."""
        return {
            "release": self.chart.name,
            "namespace": self.namespace,
            "version": self.chart.version,
            "source": self.chart.source,
            "digest": self.chart.digest,
            "custom_values": [value.text for value in self.customs],
        }

    def merged_values(self) -> dict[str, object]:
        """All values, as the chart will see them."""
        return custom.merge_values(self.chart.values, self.values)


@contextmanager
def prepare_chart(
    location: str | None, entries: Sequence[str], wait_seconds: float = WAIT_SECONDS
) -> Iterator[Installation | None]:
    """The installation of the chart at `location`, checked as far as possible without a cluster; None without a chart.

    Raises UsageError for conflicting or unsupported values, and if helm is missing; and the errors of `fetch_chart`.
    """
    customs = custom.parse_custom_values(entries)
    if location is None:
        if entries or wait_seconds != WAIT_SECONDS:
            flag = custom.FLAG if entries else "--chart-timeout"
            raise UsageError(f"{flag} needs a Helm chart.", hint="Pass it: --chart-location DIR or REPO@VERSION")
        yield None
        return
    helm = program.find_helm()
    if helm is None:
        raise UsageError(
            "Helm charts need helm, which is not on the PATH. Nothing was created.",
            hint=f"Get helm: {program.INSTALL}\n{_without_helm(location)}",
        )
    with fetch_chart(location) as chart:
        installation = Installation(chart, customs, custom.resolve_overrides(customs, chart.values), helm, wait_seconds)
        program.render_template(helm, chart, installation.namespace, installation.values)
        yield installation


def _without_helm(location: str) -> str:
    """A hint for installing a chart without a local helm."""
    chart = f"RELEASE {location}"
    if "://" in location:
        wanted = parse_chart_reference(location)
        chart = f"{wanted.name} {wanted.name} --repo {wanted.repository} --version {wanted.version}"
    return (
        "Or make the cluster without the chart, render it where helm is, and apply it:\n"
        f"  helm template {chart} --namespace default --values values.yaml >chart.yaml\n"
        "  kubectl apply -f chart.yaml"
    )


class Release(Resource):
    """The release on the cluster, found by helm's record and changed by helm."""

    kind = "Helm release"
    delete_seconds = REMOVE_SECONDS

    def __init__(
        self,
        cluster: Cluster,
        installation: Installation,
        connect: Callable[[], Access],
        needs: Sequence[Resource],
    ) -> None:
        self.cluster = cluster
        self.installation = installation
        self.connect = connect
        self.needs = tuple(needs)
        self.create_seconds = installation.wait_seconds + GRACE_SECONDS
        self.name = installation.chart.name
        self.namespace = installation.namespace
        self.remove_command = f"helm uninstall {self.name} --namespace {self.namespace}"
        self.notes = ""
        self._call: HelmCall | None = None

    def close(self) -> None:
        """Stop helm if it is still running."""
        if self._call is not None:
            self._call.stop()

    def find(self) -> ResourceStatus | None:
        """Compare helm's record on the cluster with the chart and values to install; None if there is no release."""
        with self._api() as api:
            space = _get(api, f"/api/v1/namespaces/{self.namespace}")
            if space is None:
                return None
            metadata = space["metadata"]
            if (metadata.get("labels") or {}).get(CLUSTER_TAG) != self.cluster.name:
                return ResourceStatus("there", ours=False)
            if metadata.get("deletionTimestamp"):
                return ResourceStatus("being removed", deleting=True)
            status, content = self._status(api)
        if status == "deployed" and content == self.installation.content:
            return ResourceStatus(status)
        if status.startswith(UNFINISHED):
            return self._find_unfinished(status)
        return None

    def _find_unfinished(self, status: str) -> ResourceStatus | None:
        """Whether a helm is still working on it. The status is read again, because that helm may just have ended."""
        with inheritable_lock("helm", self._lock) as lock:
            if lock is None:
                return ResourceStatus(status)
            with self._api() as api:
                last, content = self._status(api)
        if last.startswith(UNFINISHED):
            return ResourceStatus(last, broken=f"an earlier helm was interrupted ({last})")
        return ResourceStatus(last) if last == "deployed" and content == self.installation.content else None

    def create(self) -> None:
        """Start `helm upgrade --install --wait` in the background; `poll` follows it."""
        metadata = {"name": self.namespace, "labels": ownership_tags(self.cluster)}
        with self._api() as api:
            if _get(api, f"/api/v1/namespaces/{self.namespace}") is None:
                api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        words = ["upgrade", "--install", self.name, str(self.installation.chart.folder), "--namespace", self.namespace]
        words += [
            "--wait",
            "--timeout",
            f"{self.installation.wait_seconds:g}s",
            "--history-max",
            "3",
            "--output",
            "json",
            "--debug",
        ]
        words += ["--labels", f"{CONTENT}={self.installation.content}"]
        self._call = HelmCall(
            self.installation.helm,
            words,
            access=self.connect(),
            values=self.installation.values,
            lock=self._lock,
        )

    def poll(self) -> Readiness:
        """Ready when helm ends with 0; its notes are kept. Raises an error with helm's message if it fails."""
        if self._call is None:
            # Another helm is working on it; its client may have been killed.
            found = self.find()
            if found is None or found.broken:
                raise MlbenchError(f'The release "{self.name}" was not finished by another helm process.')
            return Readiness(found.state == "deployed", f"another helm process is working on it ({found.state})")
        if self._call.code is None:
            return Readiness(False, self._call.line or "helm is running")
        self._call.stop()
        if self._call.code:
            raise self._failure(self._call)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            self.notes = str(json.loads(self._call.output)["info"].get("notes") or "").strip()
        return Readiness(True)

    def delete(self) -> None:
        """Uninstall a release of an interrupted helm before it is installed again."""
        words = ["uninstall", self.name, "--namespace", self.namespace, "--wait", "--timeout", f"{REMOVE_SECONDS:g}s"]
        with HelmCall(self.installation.helm, words, access=self.connect(), lock=self._lock) as call:
            call.wait(REMOVE_SECONDS + GRACE_SECONDS)
            if call.code and "not found" not in call.complaint:
                raise MlbenchError(f'helm could not remove the release "{self.name}": {call.complaint}')

    @property
    def _lock(self) -> str:
        return f"{self.cluster.name}-{self.name}"

    def _status(self, api: Api) -> tuple[str, str]:
        """Helm's status of the newest revision, and the digest of its content; empty if there is none."""
        selector = f"owner=helm,name={self.name}"
        listed = api.get(f"/api/v1/namespaces/{self.namespace}/secrets", labelSelector=selector)["items"]
        if not listed:
            return "", ""
        newest = max((item["metadata"]["labels"] for item in listed), key=lambda labels: int(labels["version"]))
        return str(newest.get("status")), str(newest.get(CONTENT))

    def _failure(self, call: HelmCall) -> MlbenchError:
        message = f'helm did not install the chart "{self.name}": {call.complaint}'
        with contextlib.suppress(MlbenchError), self._api() as api:
            if waiting := _waiting(api, self.namespace):
                message += "\nNot ready: " + "; ".join(waiting)
        return _error_class_for(call.complaint)(
            message,
            hint=f"kubectl --namespace {self.namespace} get pods,events",
        )

    @contextmanager
    def _api(self) -> Iterator[Api]:
        """A client that raises TransientError for errors that a retry may fix."""
        try:
            with self.connect().client() as api:
                yield api
        except ApiError as error:
            if error.status in (0, 429) or error.status >= 500:
                raise TransientError(error.message, hint=error.hint) from None
            raise


def _error_class_for(complaint: str) -> type[MlbenchError]:
    """The error class for helm's message. Rejections by the API server are caused by the chart or its values."""
    if "deadline exceeded" in complaint or "timed out" in complaint:
        return DeadlineError
    if "unreachable" in complaint or "connection refused" in complaint or "context canceled" in complaint:
        return MlbenchError
    return UsageError


def _get(api: Api, path: str) -> dict[str, Any] | None:
    try:
        return api.get(path)
    except ObjectNotFound:
        return None


def _waiting(api: Api, namespace: str) -> list[str]:
    """The pods and load balancers that are not ready, with Kubernetes' reasons."""
    problems = []
    for pod in api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]:
        status = pod.get("status") or {}
        conditions = {item["type"]: item for item in status.get("conditions") or ()}
        if status.get("phase") == "Succeeded" or (conditions.get("Ready") or {}).get("status") == "True":
            continue
        containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
        states = [(item.get("state") or {}).get("waiting") for item in containers]
        reasons = [f"{state.get('reason')} {state.get('message') or ''}".strip() for state in states if state]
        unscheduled = (conditions.get("PodScheduled") or {}).get("message")
        why = "; ".join(reasons) or unscheduled or str(status.get("phase"))
        problems.append(f"pod {pod['metadata']['name']}: {why[:300]}")
    for service in api.get(f"/api/v1/namespaces/{namespace}/services")["items"]:
        given = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress")
        if service["spec"].get("type") == "LoadBalancer" and not given:
            problems.append(
                f"Service {service['metadata']['name']}: it has no load balancer; check that the cluster supports them"
            )
    return problems[:10]
