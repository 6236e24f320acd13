"""The data plane: the weighted mean of blocks, checked."""
