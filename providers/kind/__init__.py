"""KIND. Start with `provider`; `api` has the calls of docker and kind, `resources` the parts of a cluster, `discover`
the search for clusters.
"""
