"""The control API and its client: the only way to a live run."""
