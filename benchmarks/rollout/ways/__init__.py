"""The ways of generating that the rollout benchmark compares, each in processes of its own."""
