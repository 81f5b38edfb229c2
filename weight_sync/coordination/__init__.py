"""Coordinator's surroundings: its order queue, its journal, its status snapshot."""
