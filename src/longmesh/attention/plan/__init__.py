"""The plan of one attention call: what arrives when, and which blocks run, for every rank."""
