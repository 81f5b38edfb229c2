"""A replica's further nodes: the executors there, and how a version gets to their workers."""
