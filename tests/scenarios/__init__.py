"""What users have around the backend: small scenarios of public libraries, each with eager PyTorch, with Inductor and
with this backend. ``python -m tests.scenarios --help``; what is known stands in docs/scenarios.md.
"""
