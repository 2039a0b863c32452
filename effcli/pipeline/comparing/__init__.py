"""Comparing runs: what each is asked, a fresh process for each, their folder, and what is to be known of them."""
