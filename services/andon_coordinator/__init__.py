"""The control plane: who takes part, who computes which samples, commit or halt."""
