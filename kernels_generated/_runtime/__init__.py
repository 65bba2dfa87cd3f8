"""What runs beside a kernel: used by the tuner and copied into every frozen package."""
