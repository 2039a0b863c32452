"""Losses, rates and memory of a run logged to services such as TensorBoard, through accelerate's trackers.

Off by default. Whatever a service does, it changes neither what is learnt nor what is measured: calls are made between
updates, outside the time of training, with the random generators put back, and with a limit on the time they take.
"""
