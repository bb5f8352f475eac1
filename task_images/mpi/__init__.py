"""MPI as a backend of torch.distributed: `group` registers it and has the collectives, `pmi` starts it."""
