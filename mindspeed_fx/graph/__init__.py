"""Questions about an fx graph, and edits of one, answered once."""
