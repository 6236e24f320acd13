"""Reporting: a run as one page for people who were not there."""
