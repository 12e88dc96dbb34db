"""Emitters: what matched is written into the graph."""
