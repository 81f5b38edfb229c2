"""A tiny byte-level model with random weights: real text end to end, without a pretrained model."""
