"""The engine of Kubernetes clusters: one Indexed Job for each run. Start at `engine.py`; `manifests` makes the
objects."""
