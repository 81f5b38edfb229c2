"""Reading: a YAML document with positions, its problems, and values of other types."""
