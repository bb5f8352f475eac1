"""The table of providers. Each is imported when it is used, and with it its cloud's library."""

from importlib import import_module

from mlbench_cli.errors import UsageError, did_you_mean
from providers.base import Provider

# A new provider is one line here and one folder, whose class overrides what its clusters have (see `base`).
PROVIDERS = {
    "local": "providers.attached:LocalProvider",
    "kind": "providers.kind.provider:KindProvider",
    "gke": "providers.gke.provider:GkeProvider",
    "eks": "providers.eks.provider:EksProvider",
    "aks": "providers.aks.provider:AksProvider",
    "attached": "providers.attached:AttachedProvider",
    "slurm": "providers.attached:SlurmProvider",
    "hosts": "providers.attached:HostsProvider",
}
# Those whose clusters cost money as long as they exist.
PAID = ("gke", "eks", "aks")
# Names of the original's command line, and of the clouds.
ALIASES = {"gcloud": "gke", "gcp": "gke", "aws": "eks", "azure": "aks"}


def load(name: str) -> Provider:
    """The provider of that name. Raises UsageError with the nearest one."""
    name = ALIASES.get(name, name)
    if name not in PROVIDERS:
        known = [*PROVIDERS, *ALIASES]
        raise UsageError(f'There is no provider "{name}", only {", ".join(PROVIDERS)}.{did_you_mean(name, known)}')
    module, _, attribute = PROVIDERS[name].partition(":")
    provider: Provider = getattr(import_module(module), attribute)()
    return provider


def creators() -> dict[str, Provider]:
    """The providers of `create-cluster`, by name. Their modules need no cloud's library to be imported."""
    loaded = {name: load(name) for name in PROVIDERS}
    return {name: provider for name, provider in loaded.items() if provider.options is not None}
