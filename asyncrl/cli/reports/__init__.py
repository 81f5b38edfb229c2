"""What commands print: text for people, JSON for programs."""
