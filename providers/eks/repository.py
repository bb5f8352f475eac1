"""The ECR repository that `create-cluster eks --registry auto` creates for a cluster's images.

A single repository, with tasks as tags: ECR requires repositories to exist before a push, and one is easier to delete
and to find. Sources: ECR's API reference; eksctl's policies for the nodes' permission to pull.
"""

import base64
from contextlib import suppress

from mlbench_cli.errors import MlbenchError, NotFoundError
from providers.base import CLUSTER_TAG, Readiness, Resource, ResourceStatus, ownership_tags, reason_to_keep_images
from providers.eks.api import Aws, tag_list, tags_of
from providers.eks.network import Stack


class ImageRepository(Resource):
    """The image repository. It is deleted with its images before the stack, by which the cluster is found."""

    kind = "image repository"
    create_seconds = delete_seconds = 120.0

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.aws = stack.aws
        self.cluster = stack.cluster
        self.name = f"mlbench-{stack.cluster.name}"
        self.needs = (stack,)
        self.remove_command = (
            f"aws ecr delete-repository --region {self.aws.region} --repository-name {self.name} --force"
        )

    def find(self) -> ResourceStatus | None:
        found = self._describe()
        if found is None:
            return None
        tags = tags_of(self.aws.call("ecr", "list_tags_for_resource", resourceArn=found["repositoryArn"])["tags"])
        kept = reason_to_keep_images(self.cluster, self.remove_command)
        return ResourceStatus("there", ours=tags.get(CLUSTER_TAG) == self.cluster.name, kept=kept)

    def create(self) -> None:
        self.aws.call("ecr", "create_repository", repositoryName=self.name, tags=tag_list(ownership_tags(self.cluster)))

    def poll(self) -> Readiness:
        found = self._describe()
        # The ":" means that tags name tasks (mlbench_cli.tasks.images).
        return Readiness(
            found is not None, "AWS does not show it yet", {"registry": f"{found['repositoryUri']}:"} if found else {}
        )

    def delete(self) -> None:
        with suppress(NotFoundError):
            self.aws.call("ecr", "delete_repository", repositoryName=self.name, force=True)

    def _describe(self) -> dict[str, str] | None:
        found: list[dict[str, str]] | None = self.aws.find(
            "ecr", "describe_repositories", "repositories", repositoryNames=[self.name]
        )
        return found[0] if found else None


def fetch_login(aws: Aws) -> tuple[str, str]:
    """User and password of the account's registry, valid for twelve hours."""
    data = aws.call("ecr", "get_authorization_token")["authorizationData"]
    user, colon, password = base64.b64decode(data[0]["authorizationToken"]).decode().partition(":")
    if not colon:
        raise MlbenchError("ECR gave a login that is not of the form USER:PASSWORD.")
    return user, password
