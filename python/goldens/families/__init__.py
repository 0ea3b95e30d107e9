"""One module per image family: model directories, the trials of each, and plans of sizes alone."""
