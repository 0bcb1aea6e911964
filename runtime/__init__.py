"""The bundled runtime: from a container, or a checkpoint, to logits, inside a memory budget."""
