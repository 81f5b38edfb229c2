"""A Ray cluster of several nodes: joining it, checking its nodes, and which of them gets a replica."""
