"""What the installed torch brings of its own suites: databases of operators and modules, with inputs and gradients."""
