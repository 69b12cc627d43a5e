"""JSON Schemas to answer with, and a judge of the answers."""
