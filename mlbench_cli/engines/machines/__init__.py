"""Shared code of the engines for machines without Kubernetes: `node` supervises the ranks on each machine."""
