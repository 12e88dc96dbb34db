"""What a local program sends and computes, read off its graph."""
