"""Numbers that say how training goes, in verl's definitions."""
