"""Keeps a run's services as the fleet machine wants them."""
