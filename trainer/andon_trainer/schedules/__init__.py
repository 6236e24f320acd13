"""A step's life on this worker: what opens it, fills it, and commits it."""
