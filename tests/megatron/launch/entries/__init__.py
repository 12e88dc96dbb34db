"""Entry scripts of launch scripts that have one of their own, written anew: what each sends between stages is the same.

The names are those that the launch scripts give to torchrun; the runner puts the adaptor's line before them.
"""
