"""The engine that executes runs as processes of this machine."""
