"""Measurements of the system and its parts: side by side, in one run, as ratios."""
