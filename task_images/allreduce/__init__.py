"""The communication backends by themselves: how long an all-reduce of 1 to 100 million numbers takes."""
