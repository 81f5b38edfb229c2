"""Transports: how a bucket gets from the publisher to the receivers."""
