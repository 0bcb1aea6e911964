"""Recipes: their types, what one records of a prune plan, how they are read, and how ``--set`` changes one."""
