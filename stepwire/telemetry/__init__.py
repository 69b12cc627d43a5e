"""Tracing and logging: `setup`, `trace`, `logs`, and every name in `names`."""
