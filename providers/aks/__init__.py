"""Azure Kubernetes Service. Start with `provider`; `options` has its machines, `api` the calls of Azure, `resources`
the parts of a cluster, `quota` limits and offers, `discover` the search for clusters.
"""
