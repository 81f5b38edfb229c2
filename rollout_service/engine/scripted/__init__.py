"""The scripted engine: plausible traffic without a model."""
