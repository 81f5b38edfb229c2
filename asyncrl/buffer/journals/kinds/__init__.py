"""Kinds of journal: one module for each value of `buffer.journal`, found by its name."""
