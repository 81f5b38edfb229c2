"""Smaller worlds for one question each: rules of admission, and an autoscaler, in a queueing model."""
