"""Processes that rewards run in, away from the engine's."""
