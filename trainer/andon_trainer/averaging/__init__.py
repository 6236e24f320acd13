"""Gradients: from backward to the exchange, and the mean back into `p.grad`."""
