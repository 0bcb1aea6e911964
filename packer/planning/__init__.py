"""What a pack will write and take, decided before it begins: the plan, the layout, the selection, memory and time."""
