"""Rollout: a replica beside a bare engine, and when it takes another group."""
