"""The control API: the only way to a live run."""
