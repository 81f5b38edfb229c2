"""The run's configuration: one frozen tree (`tree`) and how a file becomes it (`load`)."""
