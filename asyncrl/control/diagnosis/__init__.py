"""Diagnosis of a run: obstacles to its next step, their reporters, and the service that sets its pace."""
