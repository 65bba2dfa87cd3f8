"""What may be tried: from a YAML file to a numbered set of feasible candidates."""
