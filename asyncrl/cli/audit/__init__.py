"""Audit of a run's journal: checks and reports, while the run lives or afterwards."""
