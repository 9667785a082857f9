"""Tokens before and after attention: packed rows of documents, and the loss over a cut sequence."""
