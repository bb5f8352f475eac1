"""Exports of results to other tools: trackers, tables, MLPerf's log lines, nccl-tests' JSON."""
