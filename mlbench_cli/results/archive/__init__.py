"""A run's archive: its files and documents, sealing, verifying, packing."""
