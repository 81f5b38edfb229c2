"""Files: durable and private writing, and the forms of texts and weights on disk."""
