"""One module per image family: its model directories, the sizes tried with each, and the plans of its arithmetic."""
