"""Journals: durable storage of the ledger's events and the groups' payloads."""
