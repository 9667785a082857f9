"""A whole training step, or a prefill, as a value: traced work, a clock, memory, and a search over meshes."""
