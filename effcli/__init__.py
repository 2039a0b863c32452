"""effcli: predict, train, and measure the memory of fine-tuning."""

__version__ = "0.1.0"
