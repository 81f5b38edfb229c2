"""Adapters to PyTorch's `fully_shard` (FSDP2) and transformers: the second learner backend."""
