"""The step as tasks on resources: from the graph to numbers, simulated, with bounds."""
