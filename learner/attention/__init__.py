"""Causal attention of packed rows, for every learner backend."""
