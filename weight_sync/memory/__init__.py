"""A version's bytes: how they are laid out, where they lie, who may write them."""
