"""Evaluation of generated pictures without downloaded networks: a judge, FID and KID, and a search for copies."""
