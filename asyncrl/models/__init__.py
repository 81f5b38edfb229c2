"""Models: families, their sizes and tensors by a `config.json`, and how they may be cut over ranks."""
