"""The wire types, generated from protos/stepwire/v1. Never edited by hand."""
