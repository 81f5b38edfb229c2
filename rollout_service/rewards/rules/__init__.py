"""Rules of the built-in rewards: functions of a response and its ground truth."""
