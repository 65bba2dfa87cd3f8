"""One module per language that variants are written in."""
