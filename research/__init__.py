"""Research: studies that a page of the docs cites. No package imports them, and no wheel holds them."""
