"""Generation: captions, continuations of texts, and pictures from texts."""
