"""The doctor: what a run needs, tried, with the remedy for what is missing."""
