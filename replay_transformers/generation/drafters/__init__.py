"""What proposes tokens, one module per kind of drafter. `base` says what a new one has to do."""
