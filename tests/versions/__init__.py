"""The usual tests with other versions of Python and of the packages that matter, each in an environment of its own.

* ``environments.py``: the list of versions, and how an environment is made
* ``__main__.py``: makes them, runs the tests, prints a table
"""
