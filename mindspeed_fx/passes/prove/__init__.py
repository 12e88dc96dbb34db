"""Proofs that a rewrite left what is computed: ``check="prove"``."""
