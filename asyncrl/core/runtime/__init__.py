"""Runtime: the seam to clock, threads, ids and network, and its production form."""
