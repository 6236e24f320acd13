"""The commands of `andon`, a file each."""
