"""MPI as a backend of torch.distributed: `backend` chooses and registers it, `group` has the collectives."""
