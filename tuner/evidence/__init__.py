"""What was measured, kept so that it can be compared: results, device cards, stages."""
