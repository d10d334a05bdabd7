"""Studies: drafts trained differently on the same data, then decoded with side by side."""
