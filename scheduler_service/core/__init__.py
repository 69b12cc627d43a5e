"""Requests, queue, KV blocks and the plan of each step: pure, synchronous, standard library only."""
