"""How the problem is solved: minimum cuts, search, bounds, integer programs."""
