"""The store spread over nodes as Ray actors."""
