"""Why a run on a cluster is stuck or has ended: pure functions over recorded Kubernetes objects."""
