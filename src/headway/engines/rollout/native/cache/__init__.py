"""Memory of the native engine: keys and values, and the contexts that share them."""
