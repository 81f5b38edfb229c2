"""Commands of replicas to the ledger."""
