"""Conversations of agents with their model, as they are recorded."""
