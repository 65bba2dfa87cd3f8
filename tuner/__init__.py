"""Tune kernels on an accelerator that has no profiler, only a clock."""

__version__ = "0.1.0"
