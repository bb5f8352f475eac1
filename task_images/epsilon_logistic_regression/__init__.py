"""L2-regularized logistic regression on epsilon: 2000 parameters, so a benchmark of the network's latency."""
