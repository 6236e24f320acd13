"""`Trainer`: the usual loop, already written, with `Line` and nothing else."""
