"""The engine that executes runs as Jobs of a Kubernetes cluster."""
