"""Parts of `benchmarks.pipeline.asynchrony`: the closed form, runs as plain processes, parts that sleep."""
