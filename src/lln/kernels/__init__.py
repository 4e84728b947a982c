"""Kernels: tensors in, tensors out. Nothing here knows of modules or models."""
