"""The ways from producers to consumers that `benchmarks.buffer.throughput` compares."""
