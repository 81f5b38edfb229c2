"""The services of a simulated run, but for those of weight sync."""
