"""Where prompts are cut and how the pieces are named."""
