"""A user's Helm chart, installed on a cluster that mlbench creates.

The chart is fetched and checked with its values before the cluster is created (`source`, `archive`, `values`), then
installed by the local `helm` (`tool`, `install`). It is an ordinary Helm release.
"""
