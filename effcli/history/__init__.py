"""What runs on this machine were predicted to take and took, kept in a file, and what is learnt from it. No torch."""
