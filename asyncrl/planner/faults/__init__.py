"""The simulated run under faults: the real ledger, fleet and weight sync, and what must always hold."""
