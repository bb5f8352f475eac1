"""The big Transformer on WMT17. Read `task` first."""
