"""The model itself: its shape, its layers, its heads, and how packed rows lie on a rank."""
