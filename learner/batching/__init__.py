"""Reserved groups to packed batches: alignment, minibatches, microbatches, shares of equal work."""
