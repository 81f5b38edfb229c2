"""Measurements that need a GPU; `--tiny` runs their logic on a CPU."""
