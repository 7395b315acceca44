"""Evaluation of generated images without downloaded networks: a judge, FID and KID, and a search for copies."""
