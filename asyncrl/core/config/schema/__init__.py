"""Meaning of every key of the configuration: as JSON Schema, and as a page."""

from asyncrl.core.config.schema.draft import json_schema
from asyncrl.core.config.schema.leaves import Leaf, walk

__all__ = ["Leaf", "json_schema", "walk"]
