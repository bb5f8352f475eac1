"""Models that more than one task trains."""
