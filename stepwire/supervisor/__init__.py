"""Starts scheduler and workers on this machine as its children, and ends them together."""
