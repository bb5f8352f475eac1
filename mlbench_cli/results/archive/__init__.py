"""Archives of runs: files and documents (`layout`, `documents`), deriving them (`judge`), sealing (`seal`), verifying
(`verify`), packing (`pack`)."""
