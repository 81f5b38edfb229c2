"""The ways from producers to consumers that `benchmarks.buffer` compares."""
