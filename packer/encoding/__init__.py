"""From the weights of a checkpoint to stored bytes: experts, tensors of the trunk, and codebooks."""
