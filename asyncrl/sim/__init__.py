"""Simulation: the real ledger under simulated replicas and a simulated learner."""
