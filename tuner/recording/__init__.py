"""What a program spends on operations that our kernels do."""
