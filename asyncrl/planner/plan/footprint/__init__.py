"""Footprint: bytes of memory that a configuration needs, and that a machine has."""
