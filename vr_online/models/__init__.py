"""Networks whose parameter names are those of published checkpoints."""
