"""What `benchmarks.scale` is made of: fleets in virtual time, fleets over sockets, a live run."""
