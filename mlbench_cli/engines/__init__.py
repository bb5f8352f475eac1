"""Engines: each executes runs on one kind of cluster and reports what it observes: local, hosts, slurm, kubernetes.

Start at `base.py`, the interface. `plan` makes the plan of a run's agents, `head` and `fetch` copy logs and output into
the run's folder, and `observe` turns the agents' states into an observation.
"""
