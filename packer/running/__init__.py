"""Everything around running a model: tokens in, text out, logits and their file, memory, figures."""
