"""Parts of `benchmarks.scale`: fleets in virtual time, fleets over sockets, a live run."""
