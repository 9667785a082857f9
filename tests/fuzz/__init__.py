"""Random programs on DTensors, compared with the same programs on plain tensors: `make soak`."""
