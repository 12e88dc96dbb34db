"""Products and collectives in chunks: what can be divided, how, and which choice pays."""
