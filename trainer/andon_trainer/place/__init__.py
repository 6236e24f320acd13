"""A worker's place: on the line, in its host, or alone."""
