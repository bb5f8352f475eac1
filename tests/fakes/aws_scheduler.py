"""EventBridge Scheduler of the AWS double: schedules that call EKS by a role, at the end of a cluster.

Sources: the service's API reference; public reports that CreateSchedule refuses parameters of a universal target that
are not spelled as the members of the service's model with a capital (ClusterName, not clusterName).
"""

import json
import time
from typing import Any

from moto.backends import get_backend

from tests.fakes.aws_answers import Answer, ApiError, json_answer
from tests.fakes.aws_base import ACCOUNT, Request
from tests.fakes.aws_eks import EksRules

SCHEDULED_CALLS = {
    "eks:deleteNodegroup": {"ClusterName", "NodegroupName"},
    "eks:deleteCluster": {"Name"},
    "ec2:deleteNatGateway": {"NatGatewayId"},
}


class SchedulerRules(EksRules):
    def _scheduler_CreateSchedule(self, request: Request) -> Answer:
        name = request.parts[0]
        if (request.region, name) in self.ends:
            raise ApiError("ConflictException", f"Schedule {name} already exists.", 409)
        return self._put_schedule(request)

    def _scheduler_UpdateSchedule(self, request: Request) -> Answer:
        self._schedule(request)
        return self._put_schedule(request)

    def _put_schedule(self, request: Request) -> Answer:
        """A target's parameters are checked at once, by the names of the service's model with a capital (reports)."""
        given = request.parameters
        call = given["Target"]["Arn"].removeprefix("arn:aws:scheduler:::aws-sdk:")
        lacking = SCHEDULED_CALLS[call] - set(json.loads(given["Target"]["Input"]))
        if lacking:
            raise ApiError("ValidationException", f"Invalid RequestJson provided. Missing: {sorted(lacking)}")
        if given["EndDate"] <= given["StartDate"] or given["EndDate"] <= time.time():
            raise ApiError("ValidationException", "The EndDate you specify must come after StartDate and now.")
        self.ends[request.region, request.parts[0]] = given
        return json_answer({"ScheduleArn": f"arn:aws:scheduler:{request.region}:{ACCOUNT}:schedule/default/x"})

    def _scheduler_GetSchedule(self, request: Request) -> Answer:
        return json_answer({**self._schedule(request), "Name": request.parts[0]})

    def _scheduler_DeleteSchedule(self, request: Request) -> Answer:
        self._schedule(request)
        del self.ends[request.region, request.parts[0]]
        return json_answer({})

    def _schedule(self, request: Request) -> dict[str, Any]:
        if (request.region, request.parts[0]) not in self.ends:
            raise ApiError("ResourceNotFoundException", f"Schedule {request.parts[0]} does not exist.", 404)
        return self.ends[request.region, request.parts[0]]

    def call_schedules(self, later: float) -> list[str]:
        """What Scheduler has deleted some rounds after so many seconds, as far as its role's policy allows."""
        ended: list[str] = []
        due = [(region, item) for (region, _), item in self.ends.items() if item["StartDate"] <= time.time() + later]
        for _ in range(3):
            for region, item in due:
                call = item["Target"]["Arn"].rpartition(":")[2]
                given = json.loads(item["Target"]["Input"])
                name = given.get("ClusterName") or given.get("Name")
                if call == "deleteNatGateway" or not self._may_end(item["Target"]["RoleArn"], call, name):
                    continue
                cluster = self._eks(region).clusters.get(name)
                if cluster is None:
                    continue
                if call == "deleteNodegroup" and given["NodegroupName"] in cluster.nodegroups:
                    self._end_group(cluster.nodegroups[given["NodegroupName"]], region)
                    ended.append(given["NodegroupName"])
                elif call == "deleteCluster" and not cluster.nodegroups:
                    self._end_cluster(cluster, region)
                    ended.append(name)
        return ended

    def _may_end(self, role: str, call: str, cluster: str) -> bool:
        """Whether the role is for Scheduler, and its policy names the call and the cluster."""
        found = next((item for item in get_backend("iam")[ACCOUNT]["aws"].roles.values() if item.arn == role), None)
        if found is None or "scheduler.amazonaws.com" not in str(found.assume_role_policy_document):
            return False
        policies = json.dumps(list(found.policies.values()), default=str)
        return f"eks:D{call[1:]}" in policies and (f":cluster/{cluster}" in policies)
