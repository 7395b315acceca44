"""From a prompt to text: captions and continuations."""
