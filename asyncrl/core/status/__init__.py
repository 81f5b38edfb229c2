"""Statuses of services: one struct for each kind."""
