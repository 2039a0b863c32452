"""A training step traced under fake tensors: real model code, no memory. Everything here imports torch."""
