"""`asyncrl inspect rollouts`: the answers of a run, token by token."""
