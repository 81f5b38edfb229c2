"""The parts of `asyncrl bench soak`: samples of a run's processes and files, and their trends."""
