"""The rakv command."""
