"""The `tune` command: the only part of the tuner that prints or reads the environment."""
