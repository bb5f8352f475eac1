"""What maintains this repository: checks of words and distributions, and the builder of the documentation."""
