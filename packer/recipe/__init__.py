"""Recipes: their types, how they are read and chosen from, and how ``--set`` changes one."""
