"""The trainers of the text tokenizer and of the image tokenizer."""
