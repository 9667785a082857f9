"""The reference trainer: a byte-level transformer on long packed sequences, over a mesh of data x context x tensor.

model.py (the network) · data.py (the text) · parallel.py (the mesh, and what of a step runs where) · loop.py (steps,
optimizer, checkpoints) · progress.py, report.py (what people see)

It is used by its command, which checks `options.py` before anything else is imported: so this file imports nothing.
"""
