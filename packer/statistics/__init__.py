"""Activation statistics: what they are, the file that holds them, and the weights of columns made from them."""
