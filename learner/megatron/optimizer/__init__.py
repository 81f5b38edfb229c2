"""The optimizer of one rank: its updates, and AdamW on the host."""
