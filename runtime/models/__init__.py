"""The forward passes, one module a family, on any weight store.

``kimi`` is the decoder of both Kimi families; the others are its parts. A further family is one more module with the
same names (``Decoder``, ``new_state``, ``state_bytes``, ``activation_bytes``), and a line where sessions choose it.
"""
