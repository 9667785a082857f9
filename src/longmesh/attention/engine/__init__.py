"""ContextParallel: a plan with a mesh, its arguments checked and agreed on."""
