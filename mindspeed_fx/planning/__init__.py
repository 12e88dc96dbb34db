"""What users call that calls the compiler: the search for a plan, all ranks in one process, stages of a pipeline."""
