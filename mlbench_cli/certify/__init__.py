"""The acceptance of a cluster: which nodes must go back, and what will it deliver?

The task certify (task_images/certify) measures; its samples are lines of the logs in the archive of an ordinary run.
`judge` derives certificate.json from them, when the archive is sealed and when it is verified. `expectations` are
published figures, `plan` says what a level measures and how long that takes, and `certificate` presents the document.
"""
