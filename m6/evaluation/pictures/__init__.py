"""Pictures against captions without downloaded networks: a judge trained here, distances, and a search for copies."""
