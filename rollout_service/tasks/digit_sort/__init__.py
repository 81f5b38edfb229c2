"""The demo task: sort three to five digits, with a tiny model that knows the format but not the order."""
