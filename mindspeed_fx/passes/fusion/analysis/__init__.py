"""Readers: what a subgraph means. They return a match, or None, or a near miss with its reason."""
