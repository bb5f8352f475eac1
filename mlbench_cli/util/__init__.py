"""Small helpers without knowledge of mlbench: text, units, times, files, JSON, YAML, masking of secrets."""
