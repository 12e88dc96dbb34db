"""Mutants: does a test fail where the package is wrong? Faults are planted by a seed in a private copy, one at a time,
and the tests that execute the place run until one fails.

``faults`` finds places and edits text, ``kinds`` says what a fault is, ``sample`` chooses by a seed, ``tree`` is the
private copy, ``process`` runs tests in a fork, ``recording`` knows which test executes which line, ``campaign`` runs
mutants and resumes, ``table`` writes what came of it.
"""
