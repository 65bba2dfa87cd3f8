"""What to try next: the sampler that knows the feasible set, its model, its replay."""
