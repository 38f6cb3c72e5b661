"""Builds a process's frozen settings from flags and environment, both named after the same field."""
