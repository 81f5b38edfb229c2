"""Rounds and members as a pure state machine: decisions, no data."""
