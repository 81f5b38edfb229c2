"""Learner: whole steps, packing, memory and checkpoints beside what one would write by hand."""
