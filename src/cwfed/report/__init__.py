"""Tables, pictures and pages of finished runs; they read nothing but run folders."""
