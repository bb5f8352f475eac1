"""The benchmark programs. Each folder with a `task.yaml` is a task; `contract.py` is all that the tool knows."""
