"""Diagnosis of a run: what keeps it from its next step, who says so, and who sets its pace."""
