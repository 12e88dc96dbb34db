"""The catalogue of wrong inputs: tables by subject, read by ``runner.py``."""
