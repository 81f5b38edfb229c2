"""`asyncrl doctor`: is this machine fit for a run? Looks, and changes nothing."""
