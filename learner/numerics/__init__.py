"""Numerics: precision of sums, fused log-probs, and autograd functions over ranks."""
