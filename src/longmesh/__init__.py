"""Distributed tensors and exact long-context attention for PyTorch."""
