"""Pruning: from statistics to a plan that says which experts stay, and in what tier.

``ranking`` decides, ``job`` writes the plan file and says what it means, ``plan_file`` is the file's form.
"""
