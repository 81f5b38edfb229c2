"""Parts of the staleness study: a sampler in plain torch, one cell of the grid, the report."""
