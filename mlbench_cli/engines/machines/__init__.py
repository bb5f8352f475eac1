"""Shared code of the engines for machines without Kubernetes: Slurm clusters and hosts. `agent/node.py` supervises the
ranks on each machine."""
