"""The optimizer of one rank: its updates, on the device or on the host, and the gradients they read."""
