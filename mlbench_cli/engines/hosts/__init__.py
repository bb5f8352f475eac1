"""The engine of plain hosts: one supervisor on each, started through ssh."""
