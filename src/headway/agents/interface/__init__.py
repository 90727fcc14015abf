"""What a program and its episode say to each other."""
