"""Checkpoints of the learner: format, store, background writing, export."""

from learner.checkpoint.store import CheckpointStore, Commit, Cut

__all__ = ["CheckpointStore", "Commit", "Cut"]
