"""The shaped network of a run on a cluster: made by one of three methods, proved by a probe in the pods, or refused."""
