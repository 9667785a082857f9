"""A transformers model over the axes of a mesh: tensors, experts, data and context."""

from longmesh.hf.axes.parallelize import parallelize

__all__ = ["parallelize"]
