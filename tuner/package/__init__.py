"""The frozen package and other forms in which winners leave the tuner."""
