"""`gradwire bench train` and `gradwire demo`: time to accuracy on real tasks, under DDP."""
