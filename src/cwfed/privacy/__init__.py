"""What a client's uploads reveal about its data, and what protects it: estimates of class counts, noise, row norms, DP-SGD."""
