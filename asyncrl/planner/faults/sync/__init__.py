"""Weight sync in a simulated run: the real coordinator, pool and shelf, and bytes in virtual time."""
