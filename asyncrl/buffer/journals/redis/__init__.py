"""Redis journal: streams on a server that is managed here or elsewhere."""
