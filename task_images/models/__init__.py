"""Models shared by tasks."""
