"""Harness: flags, rows, pictures and pages that all benchmarks share."""
