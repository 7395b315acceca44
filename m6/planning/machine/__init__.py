"""What a cluster is made of, and how fast its parts are."""
