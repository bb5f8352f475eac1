"""The communication backends by themselves. Read `task` first."""
