"""Looking into a container: what is read, the views that it becomes, and the views as text."""
