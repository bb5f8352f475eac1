"""Results in the forms of other tools: trackers, tables, MLPerf's log lines, nccl-tests' JSON."""
