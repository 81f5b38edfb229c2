"""Weight sync: rounds and publishes beside what their bytes cost anyway."""
