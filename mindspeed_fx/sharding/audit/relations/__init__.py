"""Whether the local programs of all ranks compute what the whole program computes, shown by relations of parts.

* ``parts.py``: what a tensor of one rank is of a whole one: dimensions made of digits, some of which ranks share
* ``rules.py``: operator -> what becomes of the parts; written from what the operators compute, and apart from the rules
  by which the local programs were made
* ``moves.py``: views, transpositions, products of matrices in their spellings
* ``indexing.py``: choices, picks and their gradients along a dimension that every rank has whole
* ``collectives.py``: the same for what is sent, and for the picking and joining of pieces around it
* ``rows.py``: rows on their way to experts, each told by its token and choice; ``numbers.py``: the integers that send
  them, computed; ``columns.py``: pieces of each row; ``routed.py``: all of it in a walk
* ``vocabulary.py``: a vocabulary in parts; ``lookups.py``: what ranks make of ids, for every id; ``losses.py``: cross
  entropy that is written out over parts, recognized
* ``compare.py``: what programs are given, and their results against those of the whole program
* ``linear_losses.py``: the same from hidden states, where no tensor holds the logits
* ``nodes.py``: what is asked of single nodes
* ``walk.py``: the programs of all ranks side by side, node by node
"""
