"""Layouts: which rank owns which tokens."""
