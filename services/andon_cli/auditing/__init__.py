"""`andon audit`: a run's steps are recomputed, and compared with what its journal has."""
