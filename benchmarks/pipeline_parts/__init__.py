"""Parts of `benchmarks.pipeline`: the closed form, runs as plain processes, parts that sleep."""
