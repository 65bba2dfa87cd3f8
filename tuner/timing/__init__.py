"""The wall clock: what a variant takes, and which of a few is the fastest."""
