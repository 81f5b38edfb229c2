"""Fleet of a run: its wanted services, its present services, and the actions that remove the difference."""
