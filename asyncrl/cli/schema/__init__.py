"""Meaning of every key of the configuration: as JSON Schema, and as a page."""

from asyncrl.cli.schema.draft import json_schema
from asyncrl.cli.schema.leaves import Leaf, walk

__all__ = ["Leaf", "json_schema", "walk"]
