"""Start and end of a run's processes: the head, Ray, the host of a service, leftovers."""
