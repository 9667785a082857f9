"""A transformers model over the axes of a mesh: tensors, experts, data and context."""

from longmesh.hf.axes.data import average_gradients
from longmesh.hf.axes.parallelize import parallelize
from longmesh.hf.axes.pretrained import from_pretrained, save_pretrained

__all__ = ["average_gradients", "from_pretrained", "parallelize", "save_pretrained"]
