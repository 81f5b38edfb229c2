"""What must hold in every simulated run, judged by who believes nobody."""
