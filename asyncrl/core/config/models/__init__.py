"""Models: architectures, sizes, and how a model may be cut over ranks."""
