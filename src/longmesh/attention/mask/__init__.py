"""Masks as values: what they show (`visible`) and the same as exact slices (`slices`)."""
