"""Recurrent layers of transformers models over a cut sequence: one file a kind of layer.

In transformers a mixer's kernels are globals of its forward. Inside a scope a copy of that forward runs whose globals
are ours (bind.py); nothing of transformers is changed.
"""
