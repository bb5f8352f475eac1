"""AWS as one local HTTP server: moto, behind a layer with what moto lacks. `python -m tests.fakes.aws FD` serves at the
listening socket with that descriptor.

moto keeps networks, roles, stacks, clusters and node groups. The layer adds states that take some looks, stacks with
parts of EKS (`aws_stacks`), add-ons, access entries, versions, quotas, placement groups, what EKS and its machines
leave in a network, the Kubernetes API of each cluster (`aws_kube`), a log of requests, and trouble. One client of
several is known by its access key; what CloudFormation asks for in its name is in the log of CLIENT/cloudformation.

Assumptions, none of them checked against the real thing, are marked with ASSUMED.
"""

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from moto import backends
from moto.backends import SERVICE_NAMES, get_backend
from moto.core.utils import get_service_model
from moto.moto_server.werkzeug_app import create_backend_app
from moto.utilities.utils import PARTITION_NAMES
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.fakes.aws_answers import Answer, ApiError, error_answer, json_answer
from tests.fakes.aws_base import ACCOUNT, TROUBLE, Request
from tests.fakes.aws_instances import InstanceRules
from tests.fakes.aws_kube import KubeSide
from tests.fakes.aws_network import NetworkRules
from tests.fakes.aws_stacks import StackRules

TAG = "mlbench-cluster"
# That nearly every test uses.
SERVICES: tuple[SERVICE_NAMES, ...] = ("autoscaling", "cloudformation", "ec2", "ecr", "eks", "iam", "sts")


class AwsDouble(StackRules, NetworkRules, InstanceRules):
    """The WSGI application. `looks`: how often something has to be asked for until it is made, or gone."""

    def __init__(self) -> None:
        super().__init__()
        self.kube = KubeSide(self)

    def load(self) -> None:
        """Load what the first requests would, EC2's machine types and IAM's policies among it: all copies have it."""
        for service in SERVICES:
            self.moto.app_instances[service] = create_backend_app(service)
        for partition in PARTITION_NAMES:  # in each of them moto looks for a client's access key
            get_backend("iam")[ACCOUNT][partition]
        get_backend("ec2")[ACCOUNT]["eu-west-1"]
        for service in SERVICES:
            get_service_model(service)
        gc.freeze()  # copies need not look through all that
        # moto would list its folders at every request, which is a quarter of its work.
        folders = list(backends.list_of_moto_modules())
        backends.list_of_moto_modules = lambda: folders

    def forget_kube(self, name: str) -> None:
        self.kube.forget(name)

    # --- the way of a request -------------------------------------------------------------------------------------

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"]
        if path.startswith("/_double/"):
            with self.lock:
                answer: Answer | None = self._control(path.removeprefix("/_double/"), environ)
        elif path.startswith("/k8s/"):
            with self.lock:
                answer = self.kube.answer(environ)
        else:
            answer = self._aws(environ)
        if answer is None:  # cut off
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            answer = Answer(500, b"")
        start(f"{answer.status} .", [*answer.headers, ("Content-Length", str(len(answer.body)))])
        return [answer.body]

    def _aws(self, environ: dict[str, Any]) -> Answer | None:
        request = Request(environ)
        with self.lock:
            log = self.log.setdefault(request.client, [])
            entry = {"number": len(log), "action": f"{request.service}:{request.action}", "target": request.target}
            log.append({**entry, "parameters": request.parameters})
            trouble = self.find_trouble(request.client, entry, request.region)
            kind, _, when = trouble.get("kind", "").partition("-")
            if trouble and when != "after":
                return self._answer_trouble(request, kind, trouble)
            answer = self._done(request)
            return self._answer_trouble(request, kind, trouble) if trouble else answer

    def _answer_trouble(self, request: Request, kind: str, trouble: dict[str, Any]) -> Answer | None:
        if kind == "kill":
            os.kill(trouble["pid"], signal.SIGKILL)
            return None
        if kind == "cut":
            return None
        code, message, status = TROUBLE[kind]
        status = 429 if kind == "throttle" and request.service == "eks" else status
        return error_answer(request.service, trouble.get("code", code), trouble.get("message", message), status)

    def _done(self, request: Request) -> Answer:
        rule = getattr(self, f"_{request.service.replace('-', '_')}_{request.action}", None)
        token = request.parameters.get("clientRequestToken")
        try:
            if token and token in self.tokens:
                return self.tokens[token]
            if request.region in self.rules.get("off_regions", ()):
                raise ApiError("InvalidClientTokenId", "The security token included in the request is invalid.", 403)
            answer = rule(request) if rule else self._pass(request)
        except ApiError as error:
            return error_answer(request.service, error.code, str(error), error.status)
        if token and answer.status < 300:
            self.tokens[token] = answer
        return answer

    # --- for tests ------------------------------------------------------------------------------------------------

    def _control(self, what: str, environ: dict[str, Any]) -> Answer:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        given = json.loads(environ["wsgi.input"].read(length)) if length else {}
        if what == "trouble":
            self.trouble.setdefault(given.pop("client"), []).append(given)
        elif what == "calm":
            for client in (given["client"], f"{given['client']}/cloudformation"):
                self.trouble.pop(client, None)
                self.log.pop(client, None)
        elif what == "log":
            return json_answer(self.log.get(given["client"], []))
        elif what == "rules":
            self.rules.update(given)
        elif what == "left":
            return json_answer(self._left_of(given["name"], given["region"]))
        elif what == "state":
            return json_answer(self._state_of(given["name"], given["region"]))
        elif what == "later":
            return json_answer(self.fire_schedules(given["seconds"]))
        elif what == "copy":
            return json_answer(self._copy())
        return json_answer({})

    def _copy(self) -> dict[str, int]:
        """A second double in a process of its own, with all that is in this one now."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self.lock = threading.RLock()
            with socket.create_server(("127.0.0.1", 0)) as listener:
                os.write(writer, f"{listener.getsockname()[1]}\n".encode())
                serve(self, listener.fileno())
        os.close(writer)
        with open(reader) as answer:
            return {"port": int(answer.readline()), "pid": child}

    def _left_of(self, name: str, region: str) -> list[str]:
        """All that there is of a cluster of that name, marked or not."""
        ec2 = get_backend("ec2")[ACCOUNT][region]
        stacks = get_backend("cloudformation")[ACCOUNT][region].stacks.values()
        roles = [role for partition in get_backend("iam")[ACCOUNT].values() for role in partition.roles.values()]
        vpcs = self._vpcs_of(name, region)
        names = [f"mlbench-{name}{suffix}" for suffix in ("", "-system", "-workers")]
        found = [f"stack {stack.name}" for stack in stacks if stack.name in names]
        found += [f"role {role.name}" for role in roles if role.name.startswith(f"mlbench-{name}-")]
        found += [f"vpc {vpc}" for vpc in vpcs]
        found += [
            f"interface {eni.id}"
            for eni in ec2.enis.values()
            if eni.description.startswith((f"aws-K8S-{name}-", f"Amazon EKS {name}"))
        ]
        found += [
            f"group {group.name}"
            for groups in ec2.groups.values()
            for group in groups.values()
            if group.name.startswith(f"eks-cluster-sg-{name}-")
        ]
        found += [f"endpoint {key}" for key, item in self.endpoints.items() if item.vpc in vpcs]
        found += [
            f"template {item.name}"
            for item in ec2.launch_templates.values()
            if {"key": TAG, "value": name} in item.get_tags()
        ]
        found += [f"placement {item['name']}" for item in self.placements.values() if item["tags"].get(TAG) == name]
        found += [f"cluster {item}" for item in self._eks(region).clusters if item == name]
        repositories = get_backend("ecr")[ACCOUNT][region].repositories
        found += [f"repository {item}" for item in repositories if item == f"mlbench-{name}"]
        return found + [f"addon {key[2]}" for key in self.addons if key[1] == name]

    def _state_of(self, name: str, region: str) -> list[str]:
        """What distinguishes one situation of a cluster from another for somebody who is to remove it."""
        stacks = {suffix: self._stack(region, f"mlbench-{name}{suffix}") for suffix in ("", "-system", "-workers")}
        found = [f"stack{suffix} {stack.status}" for suffix, stack in stacks.items() if stack]
        if cluster := self._eks(region).clusters.get(name):
            found.append(f"cluster {cluster.status}")
            found += [f"{group.nodegroup_name} {group.status}" for group in cluster.nodegroups.values()]
        found += [f"{key[2]} {value['status']}" for key, value in self.addons.items() if key[1] == name]
        found += [item.split()[0] for item in self._left_of(name, region)]
        return [item.replace(name, "NAME") for item in sorted(found)]


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer takes 40 ms

    def log_request(self, *_: Any, **__: Any) -> None:
        return

    def log(self, *_: Any, **__: Any) -> None:
        return


def serve(double: AwsDouble, descriptor: int) -> None:
    """Does not return: ends with whoever has started this process, however that ended."""
    parent = os.getppid()
    server = make_server("127.0.0.1", 0, double, threaded=True, request_handler=_Quiet, fd=descriptor)
    double.port = server.port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


if __name__ == "__main__":
    double = AwsDouble()
    double.load()
    serve(double, int(sys.argv[1]))
