"""Amazon's Elastic Kubernetes Service. Start with `provider`; `options` has its machines, `api` the calls of AWS,
`resources` the parts of a cluster, `quota` limits, `discover` the search for clusters and leftovers.
"""
