"""`longmesh plan`: which mesh, does it fit, how long."""
