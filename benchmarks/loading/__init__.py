"""What benchmarks.load_speed is made of."""
