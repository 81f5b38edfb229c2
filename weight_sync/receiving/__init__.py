"""The receiver beside one engine: its rounds, its replica, the service."""
