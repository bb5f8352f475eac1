"""A user's Helm chart on a cluster that mlbench makes: where it comes from, what values it gets, how it is installed.

Fetched and checked with its values before any cluster is paid for (`source`, `archive`, `values`), installed by the
`helm` of this machine (`helm`, `release`). Helm owns the release, so whoever has helm can look at it and change it.
"""
