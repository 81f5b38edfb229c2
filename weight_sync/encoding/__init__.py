"""Encodings of a bucket for the wire: its bytes, or its difference from a version that the receivers hold."""
