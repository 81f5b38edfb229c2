"""The control plane: places a run's services, watches and repairs them, ends them."""
