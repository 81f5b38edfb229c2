"""Pure functions on tensors: advantages, losses, off-policy correction, diagnostics. No Megatron, no Ray."""
