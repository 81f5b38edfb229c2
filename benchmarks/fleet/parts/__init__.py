"""Parts of `benchmarks.fleet.scale`: fleets in virtual time, fleets over sockets, a live run."""
