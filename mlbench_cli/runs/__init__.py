"""From a request to finished runs. `request` declares every option, `launch` resolves a request and a cluster to specs,
and `supervise` follows a run to its end. Start at `request.py`."""
