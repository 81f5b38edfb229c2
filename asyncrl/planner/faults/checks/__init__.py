"""Judges of what must hold in every simulated run."""
