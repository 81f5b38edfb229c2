"""Costs of staleness policies and of published rules: a queueing model around the real ledger."""
