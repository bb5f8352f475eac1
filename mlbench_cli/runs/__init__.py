"""The way of a run: request (one declaration of every option) -> launch (request and cluster to specs) -> supervise."""
