"""Generated from protos/rakv/v1 by scripts/protos."""
