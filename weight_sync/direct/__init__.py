"""Direct path: learner ranks send to engine workers, from device to device; the services only relay."""
