"""The processes of one run, as `torchrun` or `accelerate launch` start them: who this one is, and what all agree on."""
