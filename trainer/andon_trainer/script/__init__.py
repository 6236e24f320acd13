"""What watches a script's code: gates on its optimizers, checks of its loss and its loop."""
