"""A script's model: its layout in blocks, its wrappers, and what guards its gradients."""
