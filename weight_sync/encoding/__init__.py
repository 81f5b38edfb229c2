"""What a bucket becomes on the wire: its bytes, or how it differs from a version that the receivers hold."""
