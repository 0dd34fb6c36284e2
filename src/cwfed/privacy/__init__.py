"""What a client's uploads say about its data, and what blurs it: estimates of class counts, noise, row norms, DP-SGD."""
