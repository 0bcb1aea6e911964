"""Pruning: from statistics to a plan that says which experts stay, and in what tier.

``ranking`` decides, ``job`` writes the plan file and says what it means. ``plan`` is the file's form, ``pruning``
applies a plan to a checkpoint, and ``row_selection`` thins its routers. What a recipe records of a plan stands in
``packer.recipe.pruned``.
"""
