"""The `longmesh` command."""
