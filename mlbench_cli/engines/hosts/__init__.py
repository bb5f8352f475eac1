"""The engine of plain hosts: one agent on each, started through ssh."""
