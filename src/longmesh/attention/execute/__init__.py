"""A plan carried out on one rank: stages, transfers, heads, autograd."""
