"""Charts of reports: each file describes one kind; pages and pictures share them."""
