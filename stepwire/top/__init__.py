"""A live view of a server, from what its processes tell Prometheus."""
