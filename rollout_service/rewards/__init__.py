"""Reward functions: the built-in ones, and how a user's own is found and called."""
