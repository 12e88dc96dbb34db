"""From a joint graph to numbers: what to minimise, subject to what."""
