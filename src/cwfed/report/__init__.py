"""Tables, pictures and pages: they read run folders only."""
