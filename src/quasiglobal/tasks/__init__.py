"""Model + data → losses and gradients of all hosted nodes."""
