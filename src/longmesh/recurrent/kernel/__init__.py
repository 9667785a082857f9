"""One kernel a file: what a chunk of tokens does to a state, in plain torch."""
