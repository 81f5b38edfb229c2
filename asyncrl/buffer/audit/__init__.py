"""Checking and reading a run's journal after the fact."""
