"""The table of providers: each is imported when it is used, and with it its cloud's library."""

from importlib import import_module

from mlbench_cli.errors import UsageError, did_you_mean
from providers.base import Provider

PROVIDERS = {
    "local": "providers.local:LocalProvider",
    "kind": "providers.kind:KindProvider",
    "eks": "providers.eks:EksProvider",
    "gke": "providers.gke:GkeProvider",
    "attached": "providers.attached:AttachedProvider",
}
# What `create-cluster` can make, with the line that its help says of it.
CREATABLE = {
    "kind": "Kubernetes in Docker on this machine, to try things out",
    "gke": "Kubernetes on Google's machines, with GPUs or without; it costs money",
    "eks": "Kubernetes on Amazon's machines, with GPUs or without; it costs money",
}
# The words of the original's command line.
ALIASES = {"gcloud": "gke", "aws": "eks"}


def load(name: str) -> Provider:
    """The provider of that name. Raises UsageError with the nearest one."""
    name = ALIASES.get(name, name)
    if name not in PROVIDERS:
        known = [*PROVIDERS, *ALIASES]
        raise UsageError(f'There is no provider "{name}", only {", ".join(PROVIDERS)}.{did_you_mean(name, known)}')
    module, _, attribute = PROVIDERS[name].partition(":")
    provider: Provider = getattr(import_module(module), attribute)()
    return provider
