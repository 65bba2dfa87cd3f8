"""Measuring over several ranks: rank 0 decides, all ranks do the same, the slowest one counts."""
