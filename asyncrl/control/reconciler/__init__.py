"""Reconciler: brings a run's services to the state that the fleet machine wants."""
