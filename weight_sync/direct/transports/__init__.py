"""Groups of direct transfers: gloo between host memories, or NCCL between GPUs."""
