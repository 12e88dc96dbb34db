"""The constants of each device, one file per maker. Each has ``HARDWARE``, its devices, and ``ALIASES``, other
names.
"""
