"""GNMT on WMT16. Read `task` first."""
