"""The benchmark programs. Each folder with a `task.yaml` is one task; `contract.py` is all that the tool knows of them."""
