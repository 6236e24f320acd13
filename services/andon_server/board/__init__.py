"""The board: what a line does, in a browser, and the buttons that answer a halt."""
