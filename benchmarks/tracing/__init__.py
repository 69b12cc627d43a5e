"""The load of benchmarks.trace_complete, and what it is held against."""
