"""Creating, changing and deleting clusters, for commands and the API.

Start at `manage.py`; providers do the work.
"""
