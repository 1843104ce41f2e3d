"""Many prompts over a folder of documents, by a running service."""
