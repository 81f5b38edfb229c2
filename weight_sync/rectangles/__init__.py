"""Sharded weights, M ranks to N workers: who holds, who wants, and the parcels between them."""
