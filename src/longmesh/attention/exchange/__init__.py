"""Exchanges: how the keys and values that a rank needs come to it."""
