"""Hosts whose processes average inside, with torch.distributed, and are one worker of the line."""
