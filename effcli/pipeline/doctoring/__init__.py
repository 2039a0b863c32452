"""What works on this machine, check by check; what may hang or crash is asked in processes of its own."""
