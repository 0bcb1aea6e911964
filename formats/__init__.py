"""What bytes and names mean: the container, its codecs, and the checkpoints that it is made from.

This floor imports neither ``packer`` nor ``runtime`` and knows nothing of clustering or of options.
``SPEC.md`` beside this file decides; the code cites its sections.
"""
