"""Torch's private and moving API, one file per subsystem of torch; nothing of ours is imported here.

Features are detected, never versions. Checked with torch 2.11 (CUDA) and 2.13 (CPU)."""
