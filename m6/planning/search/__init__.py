"""Which layouts the code can run, which of them is the fastest, and the files that ask for it."""
