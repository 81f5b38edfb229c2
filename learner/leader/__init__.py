"""Rank 0's decisions: batches, publishes, checkpoints, rollbacks."""
