"""Tools that a model may call between its turns, and the environment that calls them for it."""
