"""How a run's processes begin and end: the head, Ray, the host of a service, leftovers."""
