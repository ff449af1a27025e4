"""The command line: from argv to an exit code, and nothing else."""
