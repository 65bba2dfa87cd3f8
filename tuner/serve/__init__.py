"""The child's side: it builds, verifies and measures, and answers the parent."""
