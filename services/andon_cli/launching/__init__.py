"""The processes of `andon run`: started, watched, and started again."""
