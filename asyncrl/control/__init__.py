"""The control plane: plans a run, places its services, watches them, ends them."""
