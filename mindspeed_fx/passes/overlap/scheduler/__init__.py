"""Orders of a task graph under a memory limit, and how they are kept on every rank and through Inductor."""
