"""Where the ledger's events and the groups' payloads are remembered."""
