"""The control plane: who is here, who gets which positions, commit or halt."""
