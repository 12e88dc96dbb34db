"""The fastest settings of a launch script by the model: ``mindspeed-fx tune -- ARGUMENTS``.

* ``words.py``: a command line's words and edits of them
* ``launch.py``: model, settings, and what of a launch has to stay
* ``search.py``: settings that fit, the fastest first; ``report.py``: reasons and text
* ``command.py``: the command
"""
