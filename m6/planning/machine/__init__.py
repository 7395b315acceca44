"""The devices and links of a cluster, and their speeds."""
