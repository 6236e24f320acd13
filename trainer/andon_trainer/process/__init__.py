"""This process: its device, its exit, and how torchrun started it."""
