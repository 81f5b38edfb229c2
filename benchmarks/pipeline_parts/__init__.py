"""What `benchmarks.pipeline` is made of: the closed form, runs as plain processes, parts that sleep."""
