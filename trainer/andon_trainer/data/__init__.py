"""Samples: from the script's DataLoader or dataset to the training loop."""
