"""This process: its device, its exit, and the launch that it is part of."""
