"""Generation: captions of images, continuations of texts, and images from texts."""
