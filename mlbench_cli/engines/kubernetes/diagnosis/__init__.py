"""Why a run on a cluster does not go on: pure functions over recorded Kubernetes objects."""
