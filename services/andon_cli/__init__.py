"""The console: the `andon` command, and the only place that puts the parts together."""
