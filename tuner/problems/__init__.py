"""One module per kernel: reference, rival, tolerance and cost; see CONTRIBUTING.md."""
