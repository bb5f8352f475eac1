"""Google Kubernetes Engine. Start with `provider`; `options` has its machines, `api` the calls of Google, `resources`
the parts of a cluster, `quota` limits and offers, `discover` the search for clusters and leftovers.
"""
