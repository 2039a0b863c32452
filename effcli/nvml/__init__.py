"""The NVIDIA driver's own account of devices, through `pynvml`: never a number that it did not give. No torch."""
