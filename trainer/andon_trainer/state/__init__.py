"""State: weights, optimizers and generators as digests, bytes and checkpoints."""
