"""The scenarios, one story a module."""
