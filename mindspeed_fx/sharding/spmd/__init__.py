"""The captured graph run on DTensors, which is the local program of one rank, and the operators that need collectives
inside.
"""
