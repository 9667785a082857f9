"""Ways in for code that knows nothing of the cut: scopes, intercepted calls, flex_attention."""
