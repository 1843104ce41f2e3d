"""Which cached chunks a request uses, and how they get into its KV buffer."""
