"""Measurements that need a GPU; `--quick` runs their logic on a CPU."""
